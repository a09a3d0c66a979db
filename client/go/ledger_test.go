package memstream

import (
	"context"
	"fmt"
	"testing"

	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"

	v1 "memstream.dev/go/memstream/v1"
)

// opening is what a server says that has received and stored so much, and grants a window of so many observations.
func opening(received, stored, revision int64, window int32) *v1.ObserveOpened {
	return &v1.ObserveOpened{
		Received: received, Stored: stored, ExpectedSequence: received + 1, Revision: revision,
		WindowObservations: window, WindowBytes: 1 << 20,
	}
}

// filled is a ledger that has sent so many observations on its first connection.
func filled(t *testing.T, count int64) (*ledger, []*Sent) {
	t.Helper()
	book := newLedger(nil)
	if err := book.opened(opening(0, 0, 0, 100)); err != nil {
		t.Fatal(err)
	}
	var sent []*Sent
	for number := range count {
		sent = append(sent, book.add(Text(fmt.Sprint("line ", number)), 10))
	}
	if batch := book.nextBatch(); int64(len(batch.GetObservations())) != count {
		t.Fatalf("sent %v", batch)
	}
	return book, sent
}

func TestRepeatsKeepToAWindowThatHasBecomeSmaller(t *testing.T) {
	book, sent := filled(t, 20)
	if err := book.opened(opening(20, 20, 20, 8)); err != nil {
		t.Fatal(err)
	}
	refused := &v1.RejectedObservation{Sequence: 20, Status: &spb.Status{Code: int32(codes.InvalidArgument)}}
	for _, upto := range []int64{8, 16, 20} {
		if book.repeatsSent() {
			t.Fatalf("there is more to send before %d", upto)
		}
		batch := book.nextBatch()
		if last := batch.GetFirstSequence() + int64(len(batch.GetObservations())) - 1; last != upto {
			t.Fatalf("sent up to %d, not %d", last, upto)
		}
		if book.nextBatch() != nil || !book.repeatsSent() {
			t.Fatalf("it is not time for the flush at %d", upto)
		}
		ack := &v1.Ack{Received: 20, Stored: 20, Revision: 20}
		if book.acknowledged(ack); book.received != upto-int64(len(batch.GetObservations())) {
			t.Fatalf("%d were settled by their numbers", book.received)
		}
		if upto == 20 {
			ack.Rejected = []*v1.RejectedObservation{refused}
		}
		book.repeatsSettled()
		if !book.acknowledged(ack) || book.received != upto || book.stored != upto {
			t.Fatalf("received %d, stored %d, not %d", book.received, book.stored, upto)
		}
	}
	if book.repeatsSent() || book.rejectedCount != 1 {
		t.Fatalf("%d were refused", book.rejectedCount)
	}
	for _, one := range sent {
		if _, err := one.Stored(context.Background()); (err != nil) != (one.Sequence == 20) {
			t.Fatalf("%d: %v", one.Sequence, err)
		}
	}
}

// A recall with a revision of before the restore would wait for it in vain.
func TestARestoredServersRevisionCounts(t *testing.T) {
	book, sent := filled(t, 3)
	book.acknowledged(&v1.Ack{Received: 3, Revision: 3})
	if err := book.opened(opening(1, 1, 1, 100)); err != nil {
		t.Fatal(err)
	}
	if revision, err := sent[0].Stored(context.Background()); revision != 1 || book.revision != 1 || err != nil {
		t.Fatalf("stored by %d, at %d: %v", revision, book.revision, err)
	}
	if batch := book.nextBatch(); batch.GetFirstSequence() != 2 || len(batch.GetObservations()) != 2 {
		t.Fatalf("sent %v", batch)
	}
}
