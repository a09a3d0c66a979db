package memstream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	v1 "memstream.dev/go/memstream/v1"
)

const (
	inFlightMax    = 64 // queries in flight where the server does not say how many it takes
	recallGraceMax = time.Second
	againAfter     = time.Second // for a standing query that what will pass has ended, where the server does not say
)

// Answer is the whole answer to a query.
type Answer struct {
	// Recollections are ranked, best first.
	Recollections []*v1.Recollection
	// WorkingMemory is the short-term fragments in order, those that were also ranked included.
	WorkingMemory []*v1.Fragment
	// Done says which revision was read, what was considered, and how long it took.
	Done *v1.RecallDone
}

func newAnswer(parts []*v1.Recollections, done *v1.RecallDone) *Answer {
	answer := &Answer{Done: done}
	byID := map[string]*v1.Fragment{}
	for _, part := range parts {
		answer.Recollections = append(answer.Recollections, part.GetRecollections()...)
		for _, one := range part.GetRecollections() {
			byID[one.GetFragment().GetId()] = one.GetFragment()
		}
		for _, one := range part.GetWorkingMemory() {
			byID[one.GetId()] = one
		}
	}
	for _, part := range parts {
		for _, id := range part.GetWorkingMemoryIds() {
			if fragment := byID[id]; fragment != nil {
				answer.WorkingMemory = append(answer.WorkingMemory, fragment)
			}
		}
	}
	return answer
}

type question struct {
	number   int64
	query    *v1.RecallQuery
	parts    []*v1.Recollections
	answer   *Answer
	err      error
	told     chan struct{}               // closed, and made anew, when there is another answer or an error
	standing bool                        // it goes on being answered
	known    map[string]*v1.Recollection // what a standing query has been told on this connection, by id
}

func newQuestion(query *v1.RecallQuery) *question {
	return &question{query: proto.CloneOf(query), told: make(chan struct{})}
}

// again: it is asked anew, and answered whole.
func (q *question) again() { q.parts, q.known = nil, nil }

// answered: the answer, or a change of it, is complete. It fails where that names what was never told.
func (q *question) answered(done *v1.RecallDone) error {
	answer := newAnswer(q.parts, done)
	q.parts = nil
	if q.standing {
		if err := q.rank(answer); err != nil {
			return err
		}
	}
	q.answer = answer
	q.tell()
	return nil
}

func (q *question) failed(err error) {
	q.err = err
	q.tell()
}

func (q *question) tell() {
	close(q.told)
	q.told = make(chan struct{})
}

// RecallStream is a stream of queries to one memory; made by [Memory.Recall]. Ask from as many goroutines as wanted:
// beyond what the server takes at once, queries wait their turn. A query that was not answered is asked again on the
// next connection.
type RecallStream struct {
	memory  *Memory
	session string
	end     context.CancelCauseFunc
	over    chan struct{}

	signal
	asked       map[string]*question
	again       []*question // those of an earlier connection that this one's server has no room for yet
	outbox      []*v1.RecallRequest
	ids         int64
	inFlightMax int
	connections int
	connected   bool
	closing     bool
	draining    bool
	err         error
}

// Recall opens a stream of queries and returns once the server has answered. The session, if any, is on whose behalf
// is asked. ctx bounds the stream's whole life, which ends with CANCELLED or DEADLINE_EXCEEDED when it does.
func (m *Memory) Recall(ctx context.Context, session string) (*RecallStream, error) {
	ctx, cancel := m.client.life(withRoute(ctx, m.String()))
	stream := &RecallStream{
		memory: m, session: session, end: cancel, over: make(chan struct{}), signal: newSignal(),
		asked: map[string]*question{}, inFlightMax: inFlightMax,
	}
	go stream.run(ctx)
	stream.lock()
	defer stream.unlock()
	if err := stream.until(ctx, func() bool { return stream.connections > 0 }); err != nil {
		cancel(ErrClosed)
		return nil, err
	}
	return stream, nil
}

// Query asks and waits for the answer; the stream gives the query its id. When ctx ends, this query alone is given
// up. A context without a deadline gets the client's timeout. The server is told the time limit, and stops working on the
// query then; a timeout of the query's own stays as it is.
func (s *RecallStream) Query(ctx context.Context, query *v1.RecallQuery) (*Answer, error) {
	if query.GetSubscribe() {
		return nil, invalid("query.subscribe", "is set: Subscribe asks a query that stands")
	}
	asked := newQuestion(query)
	if err := s.first(ctx, asked); err != nil {
		return nil, err
	}
	return asked.answer, nil
}

// Connections counts those that were opened.
func (s *RecallStream) Connections() int {
	s.lock()
	defer s.unlock()
	return s.connections
}

// Close waits until the queries in flight are answered, and ends the stream and with it the standing queries.
func (s *RecallStream) Close(ctx context.Context) error {
	defer s.Abandon()
	s.lock()
	defer s.unlock()
	s.closing = true
	if err := s.until(ctx, func() bool { return !s.waiting() }); err != nil {
		return err
	}
	if s.connected && !s.draining {
		s.push(&v1.RecallRequest{Message: &v1.RecallRequest_Close{Close: &v1.RecallClose{}}})
		return s.until(ctx, func() bool { return !s.connected })
	}
	return nil // nobody waits for an answer, so nothing is worth a new connection
}

// Abandon ends the stream and gives up what was asked.
func (s *RecallStream) Abandon() {
	s.end(ErrClosed)
	<-s.over
}

// first asks and waits for the first answer. When ctx ends, or the client's timeout where it has no deadline, the
// query is given up.
func (s *RecallStream) first(ctx context.Context, asked *question) error {
	if _, limited := ctx.Deadline(); !limited {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, s.memory.client.options.timeout)
		defer cancel()
	}
	if deadline, limited := ctx.Deadline(); limited && asked.query.Timeout == nil {
		if left := time.Until(deadline); left > 0 {
			asked.query.Timeout = durationpb.New(left)
		}
	}
	s.lock()
	defer s.unlock()
	if err := s.ask(ctx, asked); err != nil {
		return err
	}
	for asked.answer == nil && asked.err == nil {
		if err := s.waitFor(ctx, asked.told); err != nil {
			s.giveUp(asked)
			return err
		}
	}
	if asked.answer != nil {
		return nil
	}
	return asked.err
}

func (s *RecallStream) ask(ctx context.Context, asked *question) error {
	if err := s.until(ctx, func() bool { return s.closing || len(s.asked) < s.inFlightMax }); err != nil {
		return err
	}
	if err := s.checkUsable(); err != nil {
		return err
	}
	s.ids++
	asked.number, asked.query.QueryId = s.ids, strconv.FormatInt(s.ids, 10)
	s.asked[asked.query.GetQueryId()] = asked
	s.push(&v1.RecallRequest{Message: &v1.RecallRequest_Query{Query: asked.query}})
	return nil
}

// giveUp ends a query that is not over, and tells the server; called with the lock held.
func (s *RecallStream) giveUp(asked *question) {
	id := asked.query.GetQueryId()
	if s.asked[id] == nil {
		return
	}
	delete(s.asked, id)
	if index := slices.Index(s.again, asked); index >= 0 {
		s.again = slices.Delete(s.again, index, index+1)
	} else {
		s.push(&v1.RecallRequest{Message: &v1.RecallRequest_Cancel{Cancel: &v1.RecallCancel{QueryId: id}}})
	}
	s.notify()
}

// notify wakes whoever waits, and asks again what there is room for.
func (s *RecallStream) notify() {
	s.signal.notify()
	for len(s.again) > 0 && len(s.asked)-len(s.again) < s.inFlightMax {
		next := s.again[0]
		s.again = s.again[1:]
		s.push(&v1.RecallRequest{Message: &v1.RecallRequest_Query{Query: next.query}})
	}
}

// push hands a message to the writer; while draining nothing, the next connection asks for what is then still wanted.
func (s *RecallStream) push(request *v1.RecallRequest) {
	if !s.draining && s.connected {
		s.outbox = append(s.outbox, request)
	}
	s.signal.notify()
}

// waiting says whether somebody waits for an answer.
func (s *RecallStream) waiting() bool {
	for _, asked := range s.asked {
		if !asked.standing || asked.answer == nil {
			return true
		}
	}
	return false
}

func (s *RecallStream) checkUsable() error {
	if s.err == nil && s.closing {
		return ErrClosed
	}
	return s.err
}

func (s *RecallStream) until(ctx context.Context, ready func() bool) error {
	for !ready() {
		if s.err != nil {
			return s.err
		}
		if err := s.wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (s *RecallStream) run(ctx context.Context) {
	defer close(s.over)
	defer s.end(ErrClosed)
	retry := newBackoff(s.memory.client.options.retry)
	err := persist(ctx, retry, func() error { return s.connection(ctx, retry) })
	if err == nil {
		err = ErrClosed
	}
	s.lock()
	defer s.unlock()
	s.err = err
	for id, asked := range s.asked {
		delete(s.asked, id)
		asked.failed(err)
	}
	s.again = nil
	s.notify()
}

func (s *RecallStream) connection(ctx context.Context, retry *backoff) error {
	ctx, cancel := context.WithCancel(ctx)
	writing := make(chan struct{})
	defer func() {
		cancel()
		<-writing
		s.lock()
		defer s.unlock()
		s.connected = false
		s.notify()
	}()
	call, err := s.open(ctx)
	if err != nil {
		close(writing)
		return err
	}
	retry.opened()
	go func() {
		defer close(writing)
		s.write(ctx, call)
	}()
	for {
		response, err := call.Recv()
		if errors.Is(err, io.EOF) {
			s.lock()
			defer s.unlock()
			if s.closing && !s.waiting() {
				return nil
			}
			return unavailable("the server ended the stream")
		}
		if err != nil {
			return err
		}
		answered, err := s.take(response, cancel)
		if answered {
			retry.progressed()
		}
		if err != nil {
			return err
		}
	}
}

func (s *RecallStream) open(ctx context.Context) (v1.StreamService_RecallClient, error) {
	call, err := s.memory.client.Streams.Recall(ctx)
	if err != nil {
		return nil, err
	}
	_ = call.Send(&v1.RecallRequest{Message: &v1.RecallRequest_Open{Open: &v1.RecallOpen{
		Namespace: s.memory.Namespace, Memory: s.memory.Name, Session: s.session, DoneInRecollections: true,
	}}})
	response, err := call.Recv()
	if err != nil {
		if errors.Is(err, io.EOF) {
			err = unavailable("the server ended the stream")
		}
		return nil, err
	}
	if going := response.GetGoingAway(); going != nil {
		return nil, shuttingDown(going)
	}
	if response.GetOpened() == nil {
		return nil, protocolViolation(fmt.Sprintf("the server answered open with %T", response.GetMessage()))
	}
	s.lock()
	defer s.unlock()
	s.inFlightMax = cmp.Or(int(response.GetOpened().GetLimits().GetQueriesInFlightMax()), inFlightMax)
	s.draining, s.connected, s.outbox = false, true, nil
	s.connections++
	for _, asked := range s.asked {
		asked.again()
	}
	s.again = slices.SortedFunc(maps.Values(s.asked), func(one, other *question) int {
		return cmp.Compare(one.number, other.number)
	})
	s.notify()
	return call, nil
}

// take takes one message; whether it answered a query. It fails with SHUTTING_DOWN when it is time to reconnect.
func (s *RecallStream) take(response *v1.RecallResponse, cancel context.CancelFunc) (answered bool, err error) {
	s.lock()
	defer s.unlock()
	switch message := response.GetMessage().(type) {
	case *v1.RecallResponse_Recollections:
		if asked := s.asked[message.Recollections.GetQueryId()]; asked != nil {
			asked.parts = append(asked.parts, message.Recollections)
		}
		answered, err = s.complete(message.Recollections.GetDone())
	case *v1.RecallResponse_Done: // of an older server
		answered, err = s.complete(message.Done)
	case *v1.RecallResponse_Failed:
		answered = true
		s.refused(message.Failed)
	case *v1.RecallResponse_GoingAway:
		// Queries are only questions: what is not answered within the grace is asked of the next server.
		s.draining = true
		time.AfterFunc(min(message.GoingAway.GetGrace().AsDuration(), recallGraceMax), cancel)
	}
	if err == nil && s.draining && !s.waiting() {
		err = shuttingDown(response.GetGoingAway())
	}
	return answered, err
}

// complete answers the query of which this is the end; whether there is one.
func (s *RecallStream) complete(done *v1.RecallDone) (bool, error) {
	if done == nil {
		return false, nil
	}
	if asked := s.asked[done.GetQueryId()]; asked != nil {
		if err := asked.answered(done); err != nil {
			return false, err
		}
		if !asked.standing {
			delete(s.asked, done.GetQueryId())
		}
		s.notify()
	}
	return true, nil
}

// refused ends the query that failed; a standing one that was answered, and failed with what will pass, is asked again.
func (s *RecallStream) refused(failed *v1.RecallFailed) {
	id := failed.GetQueryId()
	asked, err := s.asked[id], fromStatus(failed.GetStatus())
	if asked == nil {
		return
	}
	if asked.standing && asked.answer != nil && isCut(err) {
		connection := s.connections
		time.AfterFunc(cmp.Or(err.RetryAfter, againAfter), func() { s.askAgain(asked, connection) })
		return
	}
	delete(s.asked, id)
	asked.failed(err)
	s.notify()
}

// askAgain asks anew on the same connection; the next one has asked it by itself.
func (s *RecallStream) askAgain(asked *question, connection int) {
	s.lock()
	defer s.unlock()
	if s.asked[asked.query.GetQueryId()] == asked && s.connections == connection && s.connected {
		asked.again()
		s.push(&v1.RecallRequest{Message: &v1.RecallRequest_Query{Query: asked.query}})
	}
}

func (s *RecallStream) write(ctx context.Context, call v1.StreamService_RecallClient) {
	for {
		request, err := s.nextRequest(ctx)
		if err != nil {
			return
		}
		if err := call.Send(request); err != nil {
			return // the reader gets the status
		}
		if request.GetClose() != nil {
			_ = call.CloseSend() // nothing may follow, and the server need not wait whether something does
			return
		}
	}
}

func (s *RecallStream) nextRequest(ctx context.Context) (*v1.RecallRequest, error) {
	s.lock()
	defer s.unlock()
	for len(s.outbox) == 0 {
		if err := s.wait(ctx); err != nil {
			return nil, err
		}
	}
	request := s.outbox[0]
	s.outbox = s.outbox[1:]
	return request, nil
}

func protocolViolation(said string) *Error {
	return &Error{
		Code: codes.FailedPrecondition, Reason: v1.ErrorReason_ERROR_REASON_PROTOCOL_VIOLATION, Message: said,
	}
}
