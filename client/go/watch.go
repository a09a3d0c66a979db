package memstream

import (
	"context"
	"errors"
	"io"

	"google.golang.org/protobuf/proto"

	v1 "memstream.dev/go/memstream/v1"
)

// Watch is a memory's events, each once, over any number of connections; made by [Memory.Watch]. It is for one
// goroutine.
type Watch struct {
	// Cursor is where a later watch would go on: after the last event that was handed out, or the last mark that
	// nothing happened.
	Cursor *v1.Cursor
	// Connections counts those that were opened.
	Connections int

	memory  *Memory
	ctx     context.Context
	end     context.CancelFunc
	request *v1.WatchRequest
	retry   *backoff
	call    v1.StreamService_WatchClient
	hangUp  context.CancelFunc
	ahead   []Happening
}

// Happening is an event and, where the watch asked for it, the fragment concerned as it was when the event was sent.
type Happening struct {
	Event    *v1.Event
	Fragment *v1.Fragment
}

// Watch begins after request.Cursor: unset from now, revision 0 with the memory's uid from the beginning, which
// [Memory.Beginning] gives. The request's other fields say what is wanted; nil takes all. ctx bounds the watch.
func (m *Memory) Watch(ctx context.Context, request *v1.WatchRequest) (*Watch, error) {
	asked := &v1.WatchRequest{}
	if request != nil {
		asked = proto.CloneOf(request)
	}
	asked.Namespace, asked.Memory = m.Namespace, m.Name
	if asked.GetCursor() == nil {
		// Asked for once and by name: a server's "now" would move when a connection is made anew.
		now, err := m.cursor(ctx)
		if err != nil {
			return nil, err
		}
		asked.Cursor = now
	}
	ctx, cancel := m.client.life(withRoute(ctx, m.String()))
	return &Watch{
		Cursor: asked.GetCursor(), memory: m, ctx: ctx, end: func() { cancel(nil) }, request: asked,
		retry: newBackoff(m.client.options.retry),
	}, nil
}

// Beginning is the cursor before the memory's first event.
func (m *Memory) Beginning(ctx context.Context) (*v1.Cursor, error) {
	cursor, err := m.cursor(ctx)
	if err != nil {
		return nil, err
	}
	cursor.Revision = 0
	return cursor, nil
}

func (m *Memory) cursor(ctx context.Context) (*v1.Cursor, error) {
	answer, err := m.client.Memories.GetMemory(ctx, &v1.GetMemoryRequest{Namespace: m.Namespace, Memory: m.Name})
	if err != nil {
		return nil, err
	}
	return &v1.Cursor{MemoryUid: answer.GetMemory().GetUid(), Revision: answer.GetMemory().GetRevision()}, nil
}

// Next waits for the next event. It fails with CURSOR_COMPACTED, CURSOR_VOID or MEMORY_DELETED where there is no
// going on, with CANCELLED when the watch is closed, with CANCELLED or DEADLINE_EXCEEDED when its context ends, and with
// ErrClosed when the client is closed.
func (w *Watch) Next() (Happening, error) {
	if w.ctx.Err() != nil {
		return Happening{}, ended(w.ctx)
	}
	for len(w.ahead) == 0 {
		if err := persist(w.ctx, w.retry, w.read); err != nil {
			return Happening{}, err
		}
	}
	next := w.ahead[0]
	w.ahead = w.ahead[1:]
	w.Cursor = next.Event.GetCursor()
	return next, nil
}

// Close ends the watch; a Next that waits fails. It may be called from another goroutine.
func (w *Watch) Close() { w.end() }

// read reads one message, over a new connection where there is none.
func (w *Watch) read() (err error) {
	if w.call == nil {
		ctx, cancel := context.WithCancel(w.ctx)
		w.request.Cursor = w.Cursor
		call, err := w.memory.client.Streams.Watch(ctx, w.request)
		if err != nil {
			cancel()
			return err
		}
		w.call, w.hangUp = call, cancel
		w.Connections++
	}
	response, err := w.call.Recv()
	if errors.Is(err, io.EOF) {
		err = unavailable("the server ended the stream")
	} else if going := response.GetGoingAway(); err == nil && going != nil {
		err = shuttingDown(going)
	}
	if err != nil {
		w.hangUp()
		w.call = nil
		return err
	}
	w.retry.opened()
	w.retry.progressed()
	if progress := response.GetProgress(); progress != nil {
		w.Cursor = progress.GetCursor()
	}
	fragments := map[string]*v1.Fragment{}
	for _, fragment := range response.GetEvents().GetFragments() {
		fragments[fragment.GetId()] = fragment
	}
	for _, event := range response.GetEvents().GetEvents() {
		w.ahead = append(w.ahead, Happening{event, fragments[event.GetFragmentId()]})
	}
	return nil
}
