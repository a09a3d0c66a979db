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

// recalling is one connection of a scripted server, opened with room for so many queries.
type recalling struct {
	v1.StreamService_RecallServer
	t *testing.T
}

func recalls(t *testing.T, call v1.StreamService_RecallServer, most int32) *recalling {
	if request, err := call.Recv(); request.GetOpen() == nil {
		t.Errorf("the client began with %v, %v", request, err)
	}
	opened := &v1.RecallOpened{Limits: &v1.Limits{QueriesInFlightMax: most}}
	one := &recalling{call, t}
	one.say(&v1.RecallResponse{Message: &v1.RecallResponse_Opened{Opened: opened}})
	return one
}

func (r *recalling) say(response *v1.RecallResponse) {
	if err := r.Send(response); err != nil {
		r.t.Error(err)
	}
}

// asked reads a query of that text and says its id.
func (r *recalling) asked(text string) string {
	request, err := r.Recv()
	if request.GetQuery().GetText() != text || request.GetQuery().GetSubscribe() != strings.HasPrefix(text, "what") {
		r.t.Errorf("the client sent %v, %v", request, err)
	}
	return request.GetQuery().GetQueryId()
}

func (r *recalling) cancelled(id string) {
	if request, err := r.Recv(); request.GetCancel().GetQueryId() != id || id == "" {
		r.t.Errorf("the client sent %v, %v, and gave up not %q", request, err, id)
	}
}

// tell tells an answer of fragments with one letter for an id; those of news are told with the revision for an etag.
func (r *recalling) tell(query string, revision int64, ranking, news string) {
	done := &v1.RecallDone{QueryId: query, Revision: revision}
	for _, id := range ranking {
		done.RankingIds = append(done.RankingIds, string(id))
	}
	part := &v1.Recollections{QueryId: query, Done: done}
	for _, id := range news {
		part.Recollections = append(part.Recollections, &v1.Recollection{
			Rank: int32(strings.IndexRune(ranking, id)) + 1, Fragment: &v1.Fragment{Id: string(id), Etag: fmt.Sprint(revision)},
		})
	}
	r.say(&v1.RecallResponse{Message: &v1.RecallResponse_Recollections{Recollections: part}})
}

func (r *recalling) fail(query string, code codes.Code, reason v1.ErrorReason, after time.Duration) {
	said := &spb.Status{Code: int32(code)}
	info := &errdetails.ErrorInfo{Domain: errorDomain, Reason: strings.TrimPrefix(reason.String(), reasonPrefix)}
	packed, err := anypb.New(info)
	if err != nil {
		r.t.Error(err)
	}
	said.Details = append(said.Details, packed)
	if after > 0 {
		if packed, err = anypb.New(&errdetails.RetryInfo{RetryDelay: durationpb.New(after)}); err != nil {
			r.t.Error(err)
		}
		said.Details = append(said.Details, packed)
	}
	failed := &v1.RecallFailed{QueryId: query, Status: said}
	r.say(&v1.RecallResponse{Message: &v1.RecallResponse_Failed{Failed: failed}})
}

// subscribed opens a stream and asks a standing query on it.
func subscribed(t *testing.T, ctx context.Context, memory *Memory) (*RecallStream, *StandingQuery) {
	t.Helper()
	stream, err := memory.Recall(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stream.Abandon)
	standing, err := stream.Subscribe(ctx, Asking("what?"))
	if err != nil {
		t.Fatal(err)
	}
	return stream, standing
}

// next fails unless the next change is as said: the answer, what entered it, changed in it and left it.
func next(t *testing.T, ctx context.Context, standing *StandingQuery, expected string) AnswerChange {
	t.Helper()
	change, err := standing.Next(ctx)
	if err != nil {
		t.Fatal(err)
	}
	found := fmt.Sprintf("%s: +%s ~%s -%s", letters(change.Answer.Recollections), letters(change.Entered),
		letters(change.Changed), strings.Join(change.Retracted, ""))
	if found != expected {
		t.Fatalf("the change is %q, not %q", found, expected)
	}
	for index, one := range change.Answer.Recollections {
		if int(one.GetRank()) != index+1 {
			t.Fatalf("%v is at %d", one, index+1)
		}
	}
	return change
}

func letters(recollections []*v1.Recollection) (ids string) {
	for _, one := range recollections {
		ids += one.GetFragment().GetId()
	}
	return ids
}

// reaches waits until the answer is of a revision.
func reaches(t *testing.T, standing *StandingQuery, revision int64) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); standing.Answer().Done.GetRevision() < revision; {
		if time.Now().After(end) {
			t.Fatalf("revision %d is not reached", revision)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestAStandingQueryHandsOutDifferencesOverConnections(t *testing.T) {
	server, memory, ctx := script(t)
	more := make(chan struct{})
	server.recalling <- func(call v1.StreamService_RecallServer) error {
		one := recalls(t, call, 4)
		id := one.asked("what?")
		one.tell(id, 1, "ab", "ab")
		<-more
		one.tell(id, 2, "cab", "c")
		one.tell(id, 3, "cba", "b") // b is of another version
		<-more
		one.tell(id, 4, "d", "d")
		one.tell(id, 5, "cba", "c") // a and b have left, and are not told anew
		return errCut
	}
	stream, standing := subscribed(t, ctx, memory)
	first := next(t, ctx, standing, "ab: +ab ~ -")
	more <- struct{}{}
	reaches(t, standing, 3)
	change := next(t, ctx, standing, "cba: +c ~b -")
	if first.Answer.Recollections[0].GetRank() != 1 || change.Answer != standing.Answer() {
		t.Fatalf("%v was handed out, the answer is %v", first, standing.Answer())
	}
	close(more)
	if _, err := standing.Next(ctx); err != nil { // d
		t.Fatal(err)
	}
	if _, err := standing.Next(ctx); !HasReason(err, v1.ErrorReason_ERROR_REASON_PROTOCOL_VIOLATION) {
		t.Fatalf("it ended with %v", err)
	}
	if _, err := stream.Query(ctx, Asking("late")); !HasReason(err, v1.ErrorReason_ERROR_REASON_PROTOCOL_VIOLATION) {
		t.Fatalf("the stream ended with %v", err)
	}
}

func TestANewConnectionTellsAStandingQueryWholeAndTheDifferenceIsHandedOut(t *testing.T) {
	server, memory, ctx := script(t)
	more := make(chan struct{})
	answers := []string{"ab", "ab", "bd"}
	for number, answer := range answers {
		server.recalling <- func(call v1.StreamService_RecallServer) error {
			one := recalls(t, call, 4)
			one.tell(one.asked("what?"), 1, answer, answer)
			if number == 2 { // of a change that is never complete
				part := &v1.Recollections{QueryId: "1", Recollections: []*v1.Recollection{{Fragment: &v1.Fragment{Id: "x"}}}}
				one.say(&v1.RecallResponse{Message: &v1.RecallResponse_Recollections{Recollections: part}})
			}
			<-more
			return errCut
		}
	}
	server.recalling <- func(call v1.StreamService_RecallServer) error {
		one := recalls(t, call, 4)
		one.tell(one.asked("what?"), 2, "bx", "") // what was told before does not count any more
		return errCut
	}
	stream, standing := subscribed(t, ctx, memory)
	next(t, ctx, standing, "ab: +ab ~ -")
	more <- struct{}{}
	more <- struct{}{}
	next(t, ctx, standing, "bd: +d ~ -a") // that it is as it was is not handed out
	more <- struct{}{}
	_, err := standing.Next(ctx)
	if !HasReason(err, v1.ErrorReason_ERROR_REASON_PROTOCOL_VIOLATION) || !strings.HasSuffix(err.Error(), "not told: b, x") {
		t.Fatalf("it ended with %v", err)
	}
	if stream.Connections() != 4 {
		t.Fatalf("there were %d connections", stream.Connections())
	}
}

func TestAStandingQueryThatFailsWithWhatPassesIsAskedAgainOnce(t *testing.T) {
	server, memory, ctx := script(t)
	unavailable := v1.ErrorReason_ERROR_REASON_JOURNAL_UNAVAILABLE
	server.recalling <- func(call v1.StreamService_RecallServer) error {
		one := recalls(t, call, 4)
		id := one.asked("what?")
		one.tell(id, 1, "a", "a")
		one.fail(id, codes.Unavailable, unavailable, 10*time.Millisecond)
		if again := one.asked("what?"); again != id {
			t.Errorf("it is asked again as %q", again)
		}
		one.tell(id, 2, "b", "b")
		one.fail(id, codes.Unavailable, unavailable, 50*time.Millisecond)
		return errCut
	}
	server.recalling <- func(call v1.StreamService_RecallServer) error {
		one := recalls(t, call, 4)
		one.tell(one.asked("what?"), 3, "c", "c")
		time.Sleep(100 * time.Millisecond)
		one.tell(one.asked("late"), 3, "", "") // nothing came between
		<-ctx.Done()
		return nil
	}
	stream, standing := subscribed(t, ctx, memory)
	next(t, ctx, standing, "a: +a ~ -")
	reaches(t, standing, 3)
	next(t, ctx, standing, "c: +c ~ -a")
	time.Sleep(100 * time.Millisecond)
	if _, err := stream.Query(ctx, Asking("late")); err != nil {
		t.Fatal(err)
	}
}

func TestAStandingQueryThatFailsEndsAlone(t *testing.T) {
	server, memory, ctx := script(t)
	server.recalling <- func(call v1.StreamService_RecallServer) error {
		one := recalls(t, call, 1)
		id := one.asked("what?")
		one.tell(id, 1, "a", "a")
		one.fail(id, codes.NotFound, v1.ErrorReason_ERROR_REASON_MEMORY_NOT_FOUND, 0)
		one.fail(one.asked("what else?"), codes.Unavailable, v1.ErrorReason_ERROR_REASON_JOURNAL_UNAVAILABLE, 0)
		one.tell(one.asked("who?"), 1, "b", "b")
		<-ctx.Done()
		return nil
	}
	stream, standing := subscribed(t, ctx, memory)
	next(t, ctx, standing, "a: +a ~ -")
	if _, err := standing.Next(ctx); !HasReason(err, v1.ErrorReason_ERROR_REASON_MEMORY_NOT_FOUND) {
		t.Fatalf("it ended with %v", err)
	}
	_, err := stream.Subscribe(ctx, Asking("what else?"))
	if !HasReason(err, v1.ErrorReason_ERROR_REASON_JOURNAL_UNAVAILABLE) {
		t.Fatalf("it was refused with %v", err)
	}
	if answer, err := stream.Query(ctx, Asking("who?")); err != nil || letters(answer.Recollections) != "b" {
		t.Fatalf("%v was answered, %v", answer, err)
	}
	asked := Asking("what?")
	asked.Subscribe = true // nobody would hear what it is told
	if _, err := stream.Query(ctx, asked); !HasReason(err, v1.ErrorReason_ERROR_REASON_INVALID_FIELD) {
		t.Fatalf("it was taken with %v", err)
	}
}

func TestAStandingQueryTakesAPlaceUntilItIsClosed(t *testing.T) {
	server, memory, ctx := script(t)
	given := make(chan struct{})
	server.recalling <- func(call v1.StreamService_RecallServer) error {
		one := recalls(t, call, 1)
		id := one.asked("what?")
		one.tell(id, 1, "a", "a")
		one.cancelled(id)
		one.tell(one.asked("who?"), 1, "b", "b")
		one.cancelled(one.asked("what takes long?"))
		close(given)
		<-ctx.Done()
		return nil
	}
	stream, standing := subscribed(t, ctx, memory)
	next(t, ctx, standing, "a: +a ~ -")
	brief, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
	defer cancel()
	if _, err := stream.Query(brief, Asking("who?")); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("there is room for it: %v", err)
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
		t.Fatalf("it ended with %v", err)
	}
	if _, err := stream.Query(ctx, Asking("who?")); err != nil {
		t.Fatal(err)
	}
	brief, cancel = context.WithTimeout(ctx, 30*time.Millisecond)
	defer cancel()
	if _, err := stream.Subscribe(brief, Asking("what takes long?")); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("it ended with %v", err)
	}
	select {
	case <-given:
	case <-ctx.Done():
		t.Fatal("the server is not told")
	}
}

func TestAContextEndsOneWaitForAChangeAlone(t *testing.T) {
	server, memory, ctx := script(t)
	more := make(chan struct{})
	server.recalling <- func(call v1.StreamService_RecallServer) error {
		one := recalls(t, call, 4)
		id := one.asked("what?")
		one.tell(id, 1, "a", "a")
		<-more
		one.tell(id, 2, "b", "b")
		<-more
		one.tell(id, 3, "c", "c")
		<-ctx.Done()
		return nil
	}
	_, standing := subscribed(t, ctx, memory)
	next(t, ctx, standing, "a: +a ~ -")
	brief, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	if _, err := standing.Next(brief); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("it ended with %v", err)
	}
	more <- struct{}{}
	next(t, ctx, standing, "b: +b ~ -a")
	more <- struct{}{}
	reaches(t, standing, 3)
	standing.Close()
	if _, err := standing.Next(ctx); !errors.Is(err, ErrClosed) {
		t.Fatalf("it ended with %v", err)
	}
}

func TestAnAnswerThatIsDegradedIsAnother(t *testing.T) {
	for degraded, differs := range map[string]bool{"": true, "dense: slow": false} {
		before := &Answer{Done: &v1.RecallDone{Degraded: degraded}}
		now := &Answer{Done: &v1.RecallDone{Degraded: "dense: away"}}
		if found := (&StandingQuery{handed: before, asked: &question{answer: now}}).differs(); found != differs {
			t.Errorf("after %q it differs: %t", degraded, found)
		}
	}
}

func TestNothingWaitsForTheEndOfAStandingQuery(t *testing.T) {
	server, memory, ctx := script(t)
	heard := make(chan struct{})
	server.recalling <- func(call v1.StreamService_RecallServer) error {
		one := recalls(t, call, 4)
		one.tell(one.asked("what?"), 1, "a", "a")
		going := &v1.GoingAway{Grace: durationpb.New(time.Minute)}
		one.say(&v1.RecallResponse{Message: &v1.RecallResponse_GoingAway{GoingAway: going}})
		begun := time.Now()
		<-call.Context().Done()
		if waited := time.Since(begun); waited > recallGraceMax/2 {
			t.Errorf("the client left after %s", waited)
		}
		return nil
	}
	server.recalling <- func(call v1.StreamService_RecallServer) error {
		one := recalls(t, call, 4)
		one.tell(one.asked("what?"), 2, "b", "b")
		id := one.asked("who?")
		close(heard)
		time.Sleep(50 * time.Millisecond)
		one.tell(id, 2, "c", "c")
		if request, err := call.Recv(); request.GetClose() == nil {
			t.Errorf("the client sent %v, %v", request, err)
		}
		return nil
	}
	stream, standing := subscribed(t, ctx, memory)
	reaches(t, standing, 2)
	next(t, ctx, standing, "b: +b ~ -")
	asked := make(chan error)
	go func() {
		_, err := stream.Query(ctx, Asking("who?"))
		asked <- err
	}()
	<-heard
	if err := stream.Close(ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-asked; err != nil {
		t.Fatal(err)
	}
	if _, err := standing.Next(ctx); !errors.Is(err, ErrClosed) {
		t.Fatalf("it ended with %v", err)
	}
	if _, err := stream.Subscribe(ctx, Asking("what?")); !errors.Is(err, ErrClosed) {
		t.Fatalf("it was asked after the end: %v", err)
	}
}
