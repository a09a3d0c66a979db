package memstream

import (
	"errors"
	"io"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	spb "google.golang.org/genproto/googleapis/rpc/status"

	v1 "memstream.dev/go/memstream/v1"
)

func refusal(sequence int64) *v1.RejectedObservation {
	return &v1.RejectedObservation{Sequence: sequence, Status: &spb.Status{Code: int32(codes.InvalidArgument)}}
}

func outcome(sequence int64, id string) *v1.ObservationOutcome {
	return &v1.ObservationOutcome{Sequence: sequence, FragmentId: id}
}

func TestRefusalAndOutcomeLostWithAConnectionComeAgain(t *testing.T) {
	server, memory, ctx := script(t)
	server.observing <- func(call v1.StreamService_ObserveServer) error {
		if open := opens(t, call, opening(0, 0, 0, 9)); open.KnownSequence != nil || !open.GetOutcomes() {
			t.Errorf("it opened with %v", open)
		}
		for received := 0; received < 3; {
			request, err := call.Recv()
			if err != nil {
				return err
			}
			received += len(request.GetBatch().GetObservations())
		}
		acks(t, call, &v1.Ack{Received: 1, Stored: 1, Revision: 1, Outcomes: []*v1.ObservationOutcome{outcome(1, "a")}})
		return errCut
	}
	server.observing <- func(call v1.StreamService_ObserveServer) error {
		opened := opening(3, 3, 2, 9)
		opened.Resumed, opened.ResumeTo, opened.Rejected = 2, 3, []*v1.RejectedObservation{refusal(2)}
		if open := opens(t, call, opened); open.KnownSequence == nil || open.GetKnownSequence() != 1 {
			t.Errorf("it opened again with %v", open)
		}
		acks(t, call, &v1.Ack{
			Received: 3, Stored: 3, Revision: 2, Resumed: 3, Outcomes: []*v1.ObservationOutcome{outcome(3, "c")},
		})
		for {
			request, err := call.Recv()
			if err != nil {
				return err
			}
			if flush := request.GetFlush(); flush != nil {
				acks(t, call, &v1.Ack{Received: 3, Stored: 3, Revision: 2, Flushed: flush.GetFlushId()})
			}
		}
	}
	stream, err := memory.Observe(ctx, "p", ObserveOptions{Outcomes: true})
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
		t.Error("the second was not refused")
	}
	if _, count := stream.Rejected(); count != 1 {
		t.Errorf("%d were refused", count)
	}
	for place, id := range map[int]string{0: "a", 2: "c"} {
		if _, err := sent[place].Stored(ctx); err != nil || sent[place].Outcome().GetFragmentId() != id {
			t.Errorf("%s became %v, %v", id, sent[place].Outcome(), err)
		}
	}
	if stream.Resumption() != nil {
		t.Errorf("it says %v of an earlier process", stream.Resumption())
	}
}

func TestProcessThatResumesGetsWhatItHasMissed(t *testing.T) {
	server, memory, ctx := script(t)
	server.observing <- func(call v1.StreamService_ObserveServer) error {
		opened := opening(5, 5, 4, 9)
		opened.Rejected, opened.Resumed, opened.ResumeTo = []*v1.RejectedObservation{refusal(4)}, 4, 5
		opened.RejectedSince, opened.OutcomesSince = 4, 5
		if open := opens(t, call, opened); open.GetKnownSequence() != 3 {
			t.Errorf("it opened with %v", open)
		}
		acks(t, call, &v1.Ack{Received: 5, Stored: 5, Resumed: 5, Outcomes: []*v1.ObservationOutcome{outcome(5, "e")}})
		if request, err := call.Recv(); err != nil || request.GetClose() == nil {
			t.Errorf("it sent %v, %v", request, err)
		}
		if request, err := call.Recv(); !errors.Is(err, io.EOF) {
			t.Errorf("after close it sent %v, %v", request, err)
		}
		say(t, call, &v1.ObserveResponse{Message: &v1.ObserveResponse_Closed{Closed: &v1.ObserveClosed{Received: 5, Stored: 5}}})
		return nil
	}
	stream, err := memory.Observe(ctx, "p", ObserveOptions{Outcomes: true, KnownSequence: proto.Int64(3)})
	if err != nil {
		t.Fatal(err)
	}
	missed := stream.Resumption()
	if len(missed.Rejected) != 1 || missed.Rejected[0].GetSequence() != 4 || missed.RejectedSince != 4 ||
		len(missed.Outcomes) != 1 || missed.Outcomes[0].GetFragmentId() != "e" || missed.OutcomesSince != 5 {
		t.Errorf("it has missed %v", missed)
	}
	if stream.ExpectedSequence() != 6 {
		t.Errorf("%d is next", stream.ExpectedSequence())
	}
	if err := stream.Close(ctx); err != nil {
		t.Fatal(err)
	}
}

func TestServerThatBreaksOffWhatItSendsAgainIsAViolation(t *testing.T) {
	server, memory, ctx := script(t)
	server.observing <- func(call v1.StreamService_ObserveServer) error {
		opened := opening(5, 5, 4, 9)
		opened.Resumed, opened.ResumeTo = 4, 5
		opens(t, call, opened)
		acks(t, call, &v1.Ack{Received: 5, Stored: 5})
		<-ctx.Done()
		return nil
	}
	_, err := memory.Observe(ctx, "p", ObserveOptions{KnownSequence: proto.Int64(3)})
	if !HasReason(err, v1.ErrorReason_ERROR_REASON_PROTOCOL_VIOLATION) {
		t.Fatalf("it ended with %v", err)
	}
}

func TestQueryTellsTheServerItsTimeLimit(t *testing.T) {
	server, memory, ctx := script(t)
	timeouts := make(chan *v1.RecallQuery, 9)
	server.recalling <- func(call v1.StreamService_RecallServer) error {
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
	if _, err := stream.Query(ctx, Asking("tea")); err != nil { // ctx ends in 10 s
		t.Fatal(err)
	}
	if left := (<-timeouts).GetTimeout().AsDuration(); left <= 0 || left > 10e9 {
		t.Errorf("the server was given %v", left)
	}
}
