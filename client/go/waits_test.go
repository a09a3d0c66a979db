package memstream

import (
	"context"
	"errors"
	"testing"
	"time"

	v1 "memstream.dev/go/memstream/v1"
)

func TestASendBehindAnotherHeedsItsContext(t *testing.T) {
	server, memory, ctx := script(t)
	roomy := make(chan struct{})
	server.observing <- func(call v1.StreamService_ObserveServer) error {
		opens(t, call, opening(0, 0, 0, 1))
		call.Recv() //nolint:errcheck // the observation that fills the window
		<-roomy
		acks(t, call, &v1.Ack{Received: 1, Stored: 1, Revision: 1})
		<-ctx.Done()
		return nil
	}
	stream, err := memory.Observe(ctx, "p", ObserveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Send(ctx, Text("one")); err != nil {
		t.Fatal(err)
	}
	second := make(chan *Sent)
	go func() {
		sent, err := stream.Send(ctx, Text("two"))
		if err != nil {
			t.Error(err)
		}
		second <- sent
	}()
	time.Sleep(20 * time.Millisecond) // it waits for the window, and the next one for its turn
	brief, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	third := make(chan error, 1)
	go func() {
		_, err := stream.Send(brief, Text("three"))
		third <- err
	}()
	select {
	case err := <-third:
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("it ended with %v", err)
		}
	case <-time.After(3 * time.Second):
		t.Error("it does not end")
	}
	close(roomy)
	if sent := <-second; sent.Sequence != 2 || stream.ExpectedSequence() != 3 {
		t.Fatalf("%d was sent, %d is next", sent.Sequence, stream.ExpectedSequence())
	}
	stream.Abandon()
}
