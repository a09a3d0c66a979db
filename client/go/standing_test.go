package memstream

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	v1 "memstream.dev/go/memstream/v1"
)

// recallCall is one Recall call of a scripted server.
type recallCall struct {
	v1.StreamService_RecallServer
	t *testing.T
}

func acceptRecall(t *testing.T, call v1.StreamService_RecallServer, most int32) *recallCall {
	if request, err := call.Recv(); request.GetOpen() == nil {
		t.Errorf("the client's first message is %v, %v", request, err)
	}
	opened := &v1.RecallOpened{Limits: &v1.Limits{QueriesInFlightMax: most}}
	one := &recallCall{call, t}
	one.send(&v1.RecallResponse{Message: &v1.RecallResponse_Opened{Opened: opened}})
	return one
}

func (r *recallCall) send(response *v1.RecallResponse) {
	if err := r.Send(response); err != nil && r.Context().Err() == nil {
		r.t.Error(err)
	}
}

// readQuery reads the next query, checks its text and returns its id.
func (r *recallCall) readQuery(text string) string {
	request, err := r.Recv()
	if request.GetQuery().GetText() != text || request.GetQuery().GetSubscribe() != strings.HasPrefix(text, "what") {
		r.t.Errorf("the client sent %v, %v", request, err)
	}
	return request.GetQuery().GetQueryId()
}

func (r *recallCall) readCancel(id string) {
	if request, err := r.Recv(); request.GetCancel().GetQueryId() != id || id == "" {
		r.t.Errorf("the client sent %v, %v, not a cancel of %q", request, err, id)
	}
}

// sendAnswer sends an answer of fragments whose ids are single letters; the fragments of sent are in the message, with the
// revision as their etag.
func (r *recallCall) sendAnswer(query string, revision int64, ranking, sent string) {
	done := &v1.RecallDone{QueryId: query, Revision: revision}
	for _, id := range ranking {
		done.RankingIds = append(done.RankingIds, string(id))
	}
	part := &v1.Recollections{QueryId: query, Done: done}
	for _, id := range sent {
		part.Recollections = append(part.Recollections, &v1.Recollection{
			Rank: int32(strings.IndexRune(ranking, id)) + 1, Fragment: &v1.Fragment{Id: string(id), Etag: fmt.Sprint(revision)},
		})
	}
	r.send(&v1.RecallResponse{Message: &v1.RecallResponse_Recollections{Recollections: part}})
}

func (r *recallCall) sendFailure(query string, code codes.Code, reason v1.ErrorReason, after time.Duration) {
	failure := &spb.Status{Code: int32(code)}
	info := &errdetails.ErrorInfo{Domain: errorDomain, Reason: strings.TrimPrefix(reason.String(), reasonPrefix)}
	packed, err := anypb.New(info)
	if err != nil {
		r.t.Error(err)
	}
	failure.Details = append(failure.Details, packed)
	if after > 0 {
		if packed, err = anypb.New(&errdetails.RetryInfo{RetryDelay: durationpb.New(after)}); err != nil {
			r.t.Error(err)
		}
		failure.Details = append(failure.Details, packed)
	}
	failed := &v1.RecallFailed{QueryId: query, Status: failure}
	r.send(&v1.RecallResponse{Message: &v1.RecallResponse_Failed{Failed: failed}})
}

// subscribe opens a stream and sends a standing query on it.
func subscribe(t *testing.T, ctx context.Context, memory *Memory) (*RecallStream, *StandingQuery) {
	t.Helper()
	stream, err := memory.Recall(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stream.Abandon)
	standing, err := stream.Subscribe(ctx, TextQuery("what?"))
	if err != nil {
		t.Fatal(err)
	}
	return stream, standing
}

// expectChange fails unless the next change is as expected: the ids of the answer, of what entered, changed and left.
func expectChange(t *testing.T, ctx context.Context, standing *StandingQuery, expected string) AnswerChange {
	t.Helper()
	change, err := standing.Next(ctx)
	if err != nil {
		t.Fatal(err)
	}
	found := fmt.Sprintf("%s: +%s ~%s -%s", idsOf(change.Answer.Recollections), idsOf(change.Entered),
		idsOf(change.Changed), strings.Join(change.Retracted, ""))
	if found != expected {
		t.Fatalf("the change is %q, want %q", found, expected)
	}
	for index, one := range change.Answer.Recollections {
		if int(one.GetRank()) != index+1 {
			t.Fatalf("the rank of %v is not %d", one, index+1)
		}
	}
	return change
}

func idsOf(recollections []*v1.Recollection) (ids string) {
	for _, one := range recollections {
		ids += one.GetFragment().GetId()
	}
	return ids
}

// waitForRevision waits until the answer has at least that revision.
func waitForRevision(t *testing.T, standing *StandingQuery, revision int64) {
	t.Helper()
	for end := time.Now().Add(time.Minute); standing.Answer().Done.GetRevision() < revision; {
		if time.Now().After(end) {
			t.Fatalf("revision %d was not reached", revision)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestStandingQueryReturnsChangesAcrossConnections(t *testing.T) {
	server, memory, ctx := startScripted(t)
	more := make(chan struct{})
	server.recallCalls <- func(call v1.StreamService_RecallServer) error {
		one := acceptRecall(t, call, 4)
		id := one.readQuery("what?")
		one.sendAnswer(id, 1, "ab", "ab")
		<-more
		one.sendAnswer(id, 2, "cab", "c")
		one.sendAnswer(id, 3, "cba", "b") // b has a new version
		<-more
		one.sendAnswer(id, 4, "d", "d")
		one.sendAnswer(id, 5, "cba", "c") // a and b have left, and are not sent again
		return errCut
	}
	stream, standing := subscribe(t, ctx, memory)
	first := expectChange(t, ctx, standing, "ab: +ab ~ -")
	more <- struct{}{}
	waitForRevision(t, standing, 3)
	change := expectChange(t, ctx, standing, "cba: +c ~b -")
	if first.Answer.Recollections[0].GetRank() != 1 || change.Answer != standing.Answer() {
		t.Fatalf("%v was returned, the answer is %v", first, standing.Answer())
	}
	close(more)
	if _, err := standing.Next(ctx); err != nil { // d
		t.Fatal(err)
	}
	if _, err := standing.Next(ctx); !HasReason(err, v1.ErrorReason_ERROR_REASON_PROTOCOL_VIOLATION) {
		t.Fatalf("the error is %v", err)
	}
	if _, err := stream.Query(ctx, TextQuery("late")); !HasReason(err, v1.ErrorReason_ERROR_REASON_PROTOCOL_VIOLATION) {
		t.Fatalf("the stream's error is %v", err)
	}
}

func TestReconnectedStandingQueryReturnsOnlyTheDifference(t *testing.T) {
	server, memory, ctx := startScripted(t)
	more := make(chan struct{})
	answers := []string{"ab", "ab", "bd"}
	for number, answer := range answers {
		server.recallCalls <- func(call v1.StreamService_RecallServer) error {
			one := acceptRecall(t, call, 4)
			one.sendAnswer(one.readQuery("what?"), 1, answer, answer)
			if number == 2 { // a part of a change that is never completed
				part := &v1.Recollections{QueryId: "1", Recollections: []*v1.Recollection{{Fragment: &v1.Fragment{Id: "x"}}}}
				one.send(&v1.RecallResponse{Message: &v1.RecallResponse_Recollections{Recollections: part}})
			}
			<-more
			return errCut
		}
	}
	server.recallCalls <- func(call v1.StreamService_RecallServer) error {
		one := acceptRecall(t, call, 4)
		one.sendAnswer(one.readQuery("what?"), 2, "bx", "") // what an earlier connection sent does not count
		return errCut
	}
	stream, standing := subscribe(t, ctx, memory)
	expectChange(t, ctx, standing, "ab: +ab ~ -")
	more <- struct{}{}
	more <- struct{}{}
	expectChange(t, ctx, standing, "bd: +d ~ -a") // the second connection changed nothing
	more <- struct{}{}
	_, err := standing.Next(ctx)
	if !HasReason(err, v1.ErrorReason_ERROR_REASON_PROTOCOL_VIOLATION) || !strings.HasSuffix(err.Error(), "not sent: b, x") {
		t.Fatalf("the error is %v", err)
	}
	if stream.Connections() != 4 {
		t.Fatalf("there were %d connections", stream.Connections())
	}
}

func TestStandingQueryIsResentOnceAfterATransientError(t *testing.T) {
	server, memory, ctx := startScripted(t)
	unavailable := v1.ErrorReason_ERROR_REASON_JOURNAL_UNAVAILABLE
	read := make(chan struct{})
	server.recallCalls <- func(call v1.StreamService_RecallServer) error {
		one := acceptRecall(t, call, 4)
		id := one.readQuery("what?")
		one.sendAnswer(id, 1, "a", "a")
		one.sendFailure(id, codes.Unavailable, unavailable, 10*time.Millisecond)
		if again := one.readQuery("what?"); again != id {
			t.Errorf("it is resent as %q", again)
		}
		<-read
		one.sendAnswer(id, 2, "b", "b")
		one.sendFailure(id, codes.Unavailable, unavailable, 50*time.Millisecond)
		return errCut
	}
	server.recallCalls <- func(call v1.StreamService_RecallServer) error {
		one := acceptRecall(t, call, 4)
		one.sendAnswer(one.readQuery("what?"), 3, "c", "c")
		time.Sleep(100 * time.Millisecond)
		one.sendAnswer(one.readQuery("late"), 3, "", "") // no query was sent before it
		<-ctx.Done()
		return nil
	}
	stream, standing := subscribe(t, ctx, memory)
	expectChange(t, ctx, standing, "a: +a ~ -")
	close(read)
	waitForRevision(t, standing, 3)
	expectChange(t, ctx, standing, "c: +c ~ -a")
	time.Sleep(100 * time.Millisecond)
	if _, err := stream.Query(ctx, TextQuery("late")); err != nil {
		t.Fatal(err)
	}
}

func TestFailingStandingQueryLeavesTheStreamOpen(t *testing.T) {
	server, memory, ctx := startScripted(t)
	server.recallCalls <- func(call v1.StreamService_RecallServer) error {
		one := acceptRecall(t, call, 1)
		id := one.readQuery("what?")
		one.sendAnswer(id, 1, "a", "a")
		one.sendFailure(id, codes.NotFound, v1.ErrorReason_ERROR_REASON_MEMORY_NOT_FOUND, 0)
		one.sendFailure(one.readQuery("what else?"), codes.Unavailable, v1.ErrorReason_ERROR_REASON_JOURNAL_UNAVAILABLE, 0)
		one.sendAnswer(one.readQuery("who?"), 1, "b", "b")
		<-ctx.Done()
		return nil
	}
	stream, standing := subscribe(t, ctx, memory)
	expectChange(t, ctx, standing, "a: +a ~ -")
	if _, err := standing.Next(ctx); !HasReason(err, v1.ErrorReason_ERROR_REASON_MEMORY_NOT_FOUND) {
		t.Fatalf("the error is %v", err)
	}
	_, err := stream.Subscribe(ctx, TextQuery("what else?"))
	if !HasReason(err, v1.ErrorReason_ERROR_REASON_JOURNAL_UNAVAILABLE) {
		t.Fatalf("the error is %v", err)
	}
	if answer, err := stream.Query(ctx, TextQuery("who?")); err != nil || idsOf(answer.Recollections) != "b" {
		t.Fatalf("the answer is %v, %v", answer, err)
	}
	asked := TextQuery("what?")
	asked.Subscribe = true // nothing would receive its changes
	if _, err := stream.Query(ctx, asked); !HasReason(err, v1.ErrorReason_ERROR_REASON_INVALID_FIELD) {
		t.Fatalf("the error is %v", err)
	}
}

func TestStandingQueryCountsAsInFlightUntilItIsClosed(t *testing.T) {
	server, memory, ctx := startScripted(t)
	given := make(chan struct{})
	server.recallCalls <- func(call v1.StreamService_RecallServer) error {
		one := acceptRecall(t, call, 1)
		id := one.readQuery("what?")
		one.sendAnswer(id, 1, "a", "a")
		one.readCancel(id)
		one.sendAnswer(one.readQuery("who?"), 1, "b", "b")
		one.readCancel(one.readQuery("what takes long?"))
		close(given)
		<-ctx.Done()
		return nil
	}
	stream, standing := subscribe(t, ctx, memory)
	expectChange(t, ctx, standing, "a: +a ~ -")
	brief, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
	defer cancel()
	if _, err := stream.Query(brief, TextQuery("who?")); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("the query was sent: %v", err)
	}
	waiting := make(chan error)
	go func() {
		_, err := standing.Next(ctx)
		waiting <- err
	}()
	time.Sleep(20 * time.Millisecond)
	standing.Close()
	standing.Close()
	if err := <-waiting; !errors.Is(err, ErrClosed) {
		t.Fatalf("the error is %v", err)
	}
	if _, err := stream.Query(ctx, TextQuery("who?")); err != nil {
		t.Fatal(err)
	}
	brief, cancel = context.WithTimeout(ctx, 30*time.Millisecond)
	defer cancel()
	if _, err := stream.Subscribe(brief, TextQuery("what takes long?")); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("the error is %v", err)
	}
	select {
	case <-given:
	case <-ctx.Done():
		t.Fatal("the server got no cancel")
	}
}

func TestContextEndsOnlyOneWaitForAChange(t *testing.T) {
	server, memory, ctx := startScripted(t)
	more := make(chan struct{})
	server.recallCalls <- func(call v1.StreamService_RecallServer) error {
		one := acceptRecall(t, call, 4)
		id := one.readQuery("what?")
		one.sendAnswer(id, 1, "a", "a")
		<-more
		one.sendAnswer(id, 2, "b", "b")
		<-more
		one.sendAnswer(id, 3, "c", "c")
		<-ctx.Done()
		return nil
	}
	_, standing := subscribe(t, ctx, memory)
	expectChange(t, ctx, standing, "a: +a ~ -")
	brief, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	if _, err := standing.Next(brief); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("the error is %v", err)
	}
	more <- struct{}{}
	expectChange(t, ctx, standing, "b: +b ~ -a")
	more <- struct{}{}
	waitForRevision(t, standing, 3)
	standing.Close()
	if _, err := standing.Next(ctx); !errors.Is(err, ErrClosed) {
		t.Fatalf("the error is %v", err)
	}
}

func TestDegradationIsAChangeOfTheAnswer(t *testing.T) {
	for degraded, want := range map[string]bool{"": true, "dense: slow": false} {
		before := &Answer{Done: &v1.RecallDone{Degraded: degraded}}
		now := &Answer{Done: &v1.RecallDone{Degraded: "dense: away"}}
		if found := (&StandingQuery{delivered: before, query: &pendingQuery{answer: now}}).hasChange(); found != want {
			t.Errorf("after %q hasChange is %t", degraded, found)
		}
	}
}

func TestDrainAndCloseDoNotWaitForStandingQueries(t *testing.T) {
	before := recallGraceMax
	recallGraceMax = time.Hour
	t.Cleanup(func() { recallGraceMax = before })
	server, memory, ctx := startScripted(t)
	seen := make(chan struct{})
	server.recallCalls <- func(call v1.StreamService_RecallServer) error {
		one := acceptRecall(t, call, 4)
		one.sendAnswer(one.readQuery("what?"), 1, "a", "a")
		going := &v1.GoingAway{Grace: durationpb.New(time.Hour)}
		one.send(&v1.RecallResponse{Message: &v1.RecallResponse_GoingAway{GoingAway: going}})
		<-call.Context().Done()
		return nil
	}
	server.recallCalls <- func(call v1.StreamService_RecallServer) error {
		one := acceptRecall(t, call, 4)
		one.sendAnswer(one.readQuery("what?"), 2, "b", "b")
		id := one.readQuery("who?")
		close(seen)
		time.Sleep(50 * time.Millisecond)
		one.sendAnswer(id, 2, "c", "c")
		if request, err := call.Recv(); request.GetClose() == nil {
			t.Errorf("the client sent %v, %v", request, err)
		}
		return nil
	}
	stream, standing := subscribe(t, ctx, memory)
	waitForRevision(t, standing, 2) // before the grace has passed: ctx ends sooner
	expectChange(t, ctx, standing, "b: +b ~ -")
	asked := make(chan error)
	go func() {
		_, err := stream.Query(ctx, TextQuery("who?"))
		asked <- err
	}()
	<-seen
	if err := stream.Close(ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-asked; err != nil {
		t.Fatal(err)
	}
	if _, err := standing.Next(ctx); !errors.Is(err, ErrClosed) {
		t.Fatalf("the error is %v", err)
	}
	if _, err := stream.Subscribe(ctx, TextQuery("what?")); !errors.Is(err, ErrClosed) {
		t.Fatalf("a query after the end fails with %v", err)
	}
}
