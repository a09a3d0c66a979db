package memstream

import (
	"context"
	"fmt"
	"testing"

	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"

	v1 "memstream.dev/go/memstream/v1"
)

// openedWith returns the answer of a server that has received and stored that much and grants that window.
func openedWith(received, stored, revision int64, window int32) *v1.ObserveOpened {
	return &v1.ObserveOpened{
		Received: received, Stored: stored, ExpectedSequence: received + 1, Revision: revision,
		WindowObservations: window, WindowBytes: 1 << 20,
	}
}

// filledLedger returns a ledger that has sent count observations on its first connection.
func filledLedger(t *testing.T, count int64) (*ledger, []*Sent) {
	t.Helper()
	ledger := newLedger(nil)
	if err := ledger.applyOpened(openedWith(0, 0, 0, 100)); err != nil {
		t.Fatal(err)
	}
	var sent []*Sent
	for number := range count {
		sent = append(sent, ledger.addObservation(Text(fmt.Sprint("line ", number)), 10))
	}
	if batch := ledger.nextBatch(); int64(len(batch.GetObservations())) != count {
		t.Fatalf("sent %v", batch)
	}
	return ledger, sent
}

func TestRepeatsStayWithinAShrunkWindow(t *testing.T) {
	ledger, sent := filledLedger(t, 20)
	if err := ledger.applyOpened(openedWith(20, 20, 20, 8)); err != nil {
		t.Fatal(err)
	}
	refused := &v1.RejectedObservation{Sequence: 20, Status: &spb.Status{Code: int32(codes.InvalidArgument)}}
	for _, upto := range []int64{8, 16, 20} {
		if ledger.repeatsSent() {
			t.Fatalf("repeats are unsent before %d", upto)
		}
		batch := ledger.nextBatch()
		if last := batch.GetFirstSequence() + int64(len(batch.GetObservations())) - 1; last != upto {
			t.Fatalf("sent up to %d, want %d", last, upto)
		}
		if ledger.nextBatch() != nil || !ledger.repeatsSent() {
			t.Fatalf("no flush is due at %d", upto)
		}
		ack := &v1.Ack{Received: 20, Stored: 20, Revision: 20}
		if ledger.applyAck(ack); ledger.received != upto-int64(len(batch.GetObservations())) {
			t.Fatalf("%d were settled by number", ledger.received)
		}
		if upto == 20 {
			ack.Rejected = []*v1.RejectedObservation{refused}
		}
		ledger.settleRepeats()
		if !ledger.applyAck(ack) || ledger.received != upto || ledger.stored != upto {
			t.Fatalf("received %d, stored %d, want %d", ledger.received, ledger.stored, upto)
		}
	}
	if ledger.repeatsSent() || ledger.rejectedCount != 1 {
		t.Fatalf("%d were rejected", ledger.rejectedCount)
	}
	for _, one := range sent {
		if _, err := one.Stored(context.Background()); (err != nil) != (one.Sequence == 20) {
			t.Fatalf("%d: %v", one.Sequence, err)
		}
	}
}

// A recall with a min_revision from before the restore would time out.
func TestRevisionFollowsARestoredServer(t *testing.T) {
	ledger, sent := filledLedger(t, 3)
	ledger.applyAck(&v1.Ack{Received: 3, Revision: 3})
	if err := ledger.applyOpened(openedWith(1, 1, 1, 100)); err != nil {
		t.Fatal(err)
	}
	if revision, err := sent[0].Stored(context.Background()); revision != 1 || ledger.revision != 1 || err != nil {
		t.Fatalf("stored at revision %d, the ledger at %d: %v", revision, ledger.revision, err)
	}
	if batch := ledger.nextBatch(); batch.GetFirstSequence() != 2 || len(batch.GetObservations()) != 2 {
		t.Fatalf("sent %v", batch)
	}
}
