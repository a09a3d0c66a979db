package memstream

import (
	"errors"
	"io"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	spb "google.golang.org/genproto/googleapis/rpc/status"

	v1 "memstream.dev/go/memstream/v1"
)

func rejectionOf(sequence int64) *v1.RejectedObservation {
	return &v1.RejectedObservation{Sequence: sequence, Status: &spb.Status{Code: int32(codes.InvalidArgument)}}
}

func outcomeOf(sequence int64, id string) *v1.ObservationOutcome {
	return &v1.ObservationOutcome{Sequence: sequence, FragmentId: id}
}

func TestLostRejectionsAndOutcomesAreResent(t *testing.T) {
	server, memory, ctx := startScripted(t)
	server.observeCalls <- func(call v1.StreamService_ObserveServer) error {
		if open := acceptOpen(t, call, openedWith(0, 0, 0, 9)); open.KnownSequence != nil || !open.GetOutcomes() ||
			open.GetRelated() != 2 {
			t.Errorf("the stream opened with %v", open)
		}
		for received := 0; received < 3; {
			request, err := call.Recv()
			if err != nil {
				return err
			}
			received += len(request.GetBatch().GetObservations())
		}
		first := outcomeOf(1, "a")
		first.Related = []*v1.RelatedFragment{{FragmentId: "z", Share: 0.5}}
		sendAck(t, call, &v1.Ack{Received: 1, Stored: 1, Revision: 1, Outcomes: []*v1.ObservationOutcome{first}})
		return errCut
	}
	server.observeCalls <- func(call v1.StreamService_ObserveServer) error {
		opened := openedWith(3, 3, 2, 9)
		opened.Resumed, opened.ResumeTo, opened.Rejected = 2, 3, []*v1.RejectedObservation{rejectionOf(2)}
		if open := acceptOpen(t, call, opened); open.KnownSequence == nil || open.GetKnownSequence() != 1 ||
			open.GetRelated() != 2 {
			t.Errorf("the stream reopened with %v", open)
		}
		sendAck(t, call, &v1.Ack{
			Received: 3, Stored: 3, Revision: 2, Resumed: 3, Outcomes: []*v1.ObservationOutcome{outcomeOf(3, "c")},
		})
		for {
			request, err := call.Recv()
			if err != nil {
				return err
			}
			if flush := request.GetFlush(); flush != nil {
				sendAck(t, call, &v1.Ack{Received: 3, Stored: 3, Revision: 2, Flushed: flush.GetFlushId()})
			}
		}
	}
	stream, err := memory.Observe(ctx, "p", ObserveOptions{Related: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Abandon()
	var sent []*Sent
	for _, content := range []string{"a", "b", "c"} {
		one, err := stream.Send(ctx, Text(content))
		if err != nil {
			t.Fatal(err)
		}
		sent = append(sent, one)
	}
	if err := stream.Flush(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := sent[1].Stored(ctx); err == nil {
		t.Error("the second was not rejected")
	}
	if _, count := stream.Rejected(); count != 1 {
		t.Errorf("%d were rejected", count)
	}
	for place, id := range map[int]string{0: "a", 2: "c"} {
		if _, err := sent[place].Stored(ctx); err != nil || sent[place].Outcome().GetFragmentId() != id {
			t.Errorf("the outcome of %s is %v, %v", id, sent[place].Outcome(), err)
		}
	}
	if near := sent[0].Outcome().GetRelated(); len(near) != 1 || near[0].GetFragmentId() != "z" {
		t.Errorf("the first is related to %v", near)
	}
	if stream.Resumption() != nil {
		t.Errorf("there is a resumption: %v", stream.Resumption())
	}
}

func TestResumingProcessGetsMissedResults(t *testing.T) {
	server, memory, ctx := startScripted(t)
	server.observeCalls <- func(call v1.StreamService_ObserveServer) error {
		opened := openedWith(5, 5, 4, 9)
		opened.Rejected, opened.Resumed, opened.ResumeTo = []*v1.RejectedObservation{rejectionOf(4)}, 4, 5
		opened.RejectedSince, opened.OutcomesSince = 4, 5
		if open := acceptOpen(t, call, opened); open.GetKnownSequence() != 3 {
			t.Errorf("the stream opened with %v", open)
		}
		sendAck(t, call, &v1.Ack{Received: 5, Stored: 5, Resumed: 5, Outcomes: []*v1.ObservationOutcome{outcomeOf(5, "e")}})
		if request, err := call.Recv(); err != nil || request.GetClose() == nil {
			t.Errorf("the client sent %v, %v", request, err)
		}
		if request, err := call.Recv(); !errors.Is(err, io.EOF) {
			t.Errorf("after close the client sent %v, %v", request, err)
		}
		sendResponse(t, call, &v1.ObserveResponse{Message: &v1.ObserveResponse_Closed{Closed: &v1.ObserveClosed{Received: 5, Stored: 5}}})
		return nil
	}
	stream, err := memory.Observe(ctx, "p", ObserveOptions{Outcomes: true, KnownSequence: proto.Int64(3)})
	if err != nil {
		t.Fatal(err)
	}
	missed := stream.Resumption()
	if len(missed.Rejected) != 1 || missed.Rejected[0].GetSequence() != 4 || missed.RejectedSince != 4 ||
		len(missed.Outcomes) != 1 || missed.Outcomes[0].GetFragmentId() != "e" || missed.OutcomesSince != 5 {
		t.Errorf("the resumption is %v", missed)
	}
	if stream.ExpectedSequence() != 6 {
		t.Errorf("the next number is %d", stream.ExpectedSequence())
	}
	if err := stream.Close(ctx); err != nil {
		t.Fatal(err)
	}
}

func TestIncompleteResumptionIsAProtocolViolation(t *testing.T) {
	server, memory, ctx := startScripted(t)
	server.observeCalls <- func(call v1.StreamService_ObserveServer) error {
		opened := openedWith(5, 5, 4, 9)
		opened.Resumed, opened.ResumeTo = 4, 5
		acceptOpen(t, call, opened)
		sendAck(t, call, &v1.Ack{Received: 5, Stored: 5})
		<-ctx.Done()
		return nil
	}
	_, err := memory.Observe(ctx, "p", ObserveOptions{KnownSequence: proto.Int64(3)})
	if !HasReason(err, v1.ErrorReason_ERROR_REASON_PROTOCOL_VIOLATION) {
		t.Fatalf("the error is %v", err)
	}
}

func TestQueryCarriesItsTimeLimit(t *testing.T) {
	server, memory, ctx := startScripted(t)
	timeouts := make(chan *v1.RecallQuery, 9)
	server.recallCalls <- func(call v1.StreamService_RecallServer) error {
		call.Recv()                                                                                   //nolint:errcheck // the opening
		call.Send(&v1.RecallResponse{Message: &v1.RecallResponse_Opened{Opened: &v1.RecallOpened{}}}) //nolint:errcheck
		for {
			request, err := call.Recv()
			if err != nil {
				return err
			}
			if query := request.GetQuery(); query != nil {
				timeouts <- query
				done := &v1.RecallDone{QueryId: query.GetQueryId()}
				call.Send(&v1.RecallResponse{Message: &v1.RecallResponse_Done{Done: done}}) //nolint:errcheck
			}
		}
	}
	stream, err := memory.Recall(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Abandon()
	if _, err := stream.Query(ctx, TextQuery("tea")); err != nil { // ctx ends in a minute
		t.Fatal(err)
	}
	if left := (<-timeouts).GetTimeout().AsDuration(); left <= 0 || left > time.Minute {
		t.Errorf("the timeout is %v", left)
	}
}
