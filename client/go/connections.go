package memstream

import (
	"context"
	"sync"

	"google.golang.org/grpc"
)

// callsMax limits the calls on a connection unless the server allows fewer: HTTP/2 recommends that every hop allows at
// least 100.
const callsMax = 96

// connections is what the generated clients call: as many connections as the calls need. A server takes a limited number
// of calls and streams on a connection, and gRPC holds back what exceeds it, without an error, until the deadline. So a
// call goes to the first connection that has room, and to another one before that limit is reached. A connection without
// calls is closed if another one has room.
type connections struct {
	dial func() (*grpc.ClientConn, error)

	mutex  sync.Mutex
	room   int
	open   []*connection
	closed bool
}

type connection struct {
	*grpc.ClientConn
	calls int
}

// newConnections makes the first connection with dial.
func newConnections(dial func() (*grpc.ClientConn, error)) (*connections, error) {
	first, err := dial()
	if err != nil {
		return nil, err
	}
	return &connections{dial: dial, room: callsMax, open: []*connection{{ClientConn: first}}}, nil
}

// allowCalls records how many calls the server allows on a connection; 0 if it does not say.
func (c *connections) allowCalls(limit int) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if limit > 0 {
		c.room = max(1, min(callsMax, limit-limit/8)) // the server may count a call a little longer
	}
}

func (c *connections) first() *grpc.ClientConn {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return c.open[0].ClientConn
}

// Close ends all connections and their calls.
func (c *connections) Close() error {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.closed = true
	var failed error
	for _, each := range c.open {
		if err := each.Close(); err != nil {
			failed = err
		}
	}
	return failed
}

// Invoke implements [grpc.ClientConnInterface].
func (c *connections) Invoke(ctx context.Context, method string, request, reply any, options ...grpc.CallOption) error {
	taken, err := c.take()
	if err != nil {
		return err
	}
	defer c.release(taken)
	return taken.Invoke(ctx, method, request, reply, options...)
}

// NewStream implements [grpc.ClientConnInterface].
func (c *connections) NewStream(
	ctx context.Context, description *grpc.StreamDesc, method string, options ...grpc.CallOption,
) (grpc.ClientStream, error) {
	taken, err := c.take()
	if err != nil {
		return nil, err
	}
	var once sync.Once
	end := func(error) { once.Do(func() { c.release(taken) }) }
	stream, err := taken.NewStream(ctx, description, method, append(options, grpc.OnFinish(end))...)
	if err != nil {
		end(err)
	}
	return stream, err
}

func (c *connections) take() (*connection, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	for _, each := range c.open {
		if each.calls < c.room || c.closed {
			each.calls++
			return each, nil
		}
	}
	made, err := c.dial()
	if err != nil {
		return nil, err
	}
	c.open = append(c.open, &connection{ClientConn: made, calls: 1})
	return c.open[len(c.open)-1], nil
}

func (c *connections) release(taken *connection) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	taken.calls--
	if c.closed {
		return
	}
	for _, idle := range c.open[1:] { // Conn returns the first one
		if idle.calls == 0 && c.hasRoomBeside(idle) {
			c.remove(idle)
			return
		}
	}
}

// hasRoomBeside reports whether another connection is at most half full.
func (c *connections) hasRoomBeside(idle *connection) bool {
	for _, other := range c.open {
		if other != idle && 2*other.calls <= c.room {
			return true
		}
	}
	return false
}

func (c *connections) remove(taken *connection) {
	for place, each := range c.open {
		if each == taken {
			c.open = append(c.open[:place:place], c.open[place+1:]...)
			go func() { _ = taken.Close() }() // not here: it waits for calls that end while the mutex is locked
			return
		}
	}
}
