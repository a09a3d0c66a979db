package memstream

import (
	"context"
	"errors"
	"io"

	"google.golang.org/protobuf/proto"

	v1 "memstream.dev/go/memstream/v1"
)

// Watch returns each event of a memory once, over any number of connections; created by [Memory.Watch]. It is not safe for
// concurrent use.
type Watch struct {
	// Cursor is the position for a later watch: after the last event returned or the last progress mark.
	Cursor *v1.Cursor
	// Connections is the number of connections opened so far.
	Connections int

	memory     *Memory
	ctx        context.Context
	cancel     context.CancelFunc
	request    *v1.WatchRequest
	retry      *backoff
	call       v1.StreamService_WatchClient
	cancelCall context.CancelFunc
	ahead      []WatchedEvent
}

// WatchedEvent is an event and, if the watch includes fragments, its fragment as it was when the event was sent.
type WatchedEvent struct {
	Event    *v1.Event
	Fragment *v1.Fragment
}

// Watch starts after request.Cursor: without a cursor it starts now, with the cursor of [Memory.Beginning] at the memory's
// first event. The request's other fields filter the events; nil selects all. The end of ctx ends the watch.
func (m *Memory) Watch(ctx context.Context, request *v1.WatchRequest) (*Watch, error) {
	asked := &v1.WatchRequest{}
	if request != nil {
		asked = proto.CloneOf(request)
	}
	asked.Namespace, asked.Memory = m.Namespace, m.Name
	if asked.GetCursor() == nil {
		// Resolve "now" once: the server's "now" would move with each reconnect.
		now, err := m.currentCursor(ctx)
		if err != nil {
			return nil, err
		}
		asked.Cursor = now
	}
	ctx, cancel := m.client.streamContext(withRoute(ctx, m.String()))
	return &Watch{
		Cursor: asked.GetCursor(), memory: m, ctx: ctx, cancel: func() { cancel(nil) }, request: asked,
		retry: newBackoff(m.client.options.retry),
	}, nil
}

// Beginning returns the cursor before the memory's first event.
func (m *Memory) Beginning(ctx context.Context) (*v1.Cursor, error) {
	cursor, err := m.currentCursor(ctx)
	if err != nil {
		return nil, err
	}
	cursor.Revision = 0
	return cursor, nil
}

func (m *Memory) currentCursor(ctx context.Context) (*v1.Cursor, error) {
	answer, err := m.client.Memories.GetMemory(ctx, &v1.GetMemoryRequest{Namespace: m.Namespace, Memory: m.Name})
	if err != nil {
		return nil, err
	}
	return &v1.Cursor{MemoryUid: answer.GetMemory().GetUid(), Revision: answer.GetMemory().GetRevision()}, nil
}

// Next waits for the next event. It fails with CURSOR_COMPACTED, CURSOR_VOID or MEMORY_DELETED if the watch cannot
// continue, with CANCELLED when the watch is closed, with CANCELLED or DEADLINE_EXCEEDED when its context ends, and with
// ErrClosed when the client is closed.
func (w *Watch) Next() (WatchedEvent, error) {
	if w.ctx.Err() != nil {
		return WatchedEvent{}, endError(w.ctx)
	}
	for len(w.ahead) == 0 {
		if err := repeatUntilDone(w.ctx, w.retry, w.readMessage); err != nil {
			return WatchedEvent{}, err
		}
	}
	next := w.ahead[0]
	w.ahead = w.ahead[1:]
	w.Cursor = next.Event.GetCursor()
	return next, nil
}

// Close ends the watch; a waiting Next fails. Any goroutine may call it.
func (w *Watch) Close() { w.cancel() }

// readMessage reads one message, over a new connection if there is none.
func (w *Watch) readMessage() (err error) {
	if w.call == nil {
		ctx, cancel := context.WithCancel(w.ctx)
		w.request.Cursor = w.Cursor
		call, err := w.memory.client.Streams.Watch(ctx, w.request)
		if err != nil {
			cancel()
			return err
		}
		w.call, w.cancelCall = call, cancel
		w.Connections++
	}
	response, err := w.call.Recv()
	if errors.Is(err, io.EOF) {
		err = unavailableError("the server ended the stream")
	} else if going := response.GetGoingAway(); err == nil && going != nil {
		err = shuttingDownError(going)
	}
	if err != nil {
		w.cancelCall()
		w.call = nil
		return err
	}
	w.retry.markOpened()
	w.retry.markProgress()
	if progress := response.GetProgress(); progress != nil {
		w.Cursor = progress.GetCursor()
	}
	fragments := map[string]*v1.Fragment{}
	for _, fragment := range response.GetEvents().GetFragments() {
		fragments[fragment.GetId()] = fragment
	}
	for _, event := range response.GetEvents().GetEvents() {
		w.ahead = append(w.ahead, WatchedEvent{event, fragments[event.GetFragmentId()]})
	}
	return nil
}
