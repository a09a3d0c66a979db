package memstream

import (
	"cmp"
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"memstream.dev/go/internal/callers"
	v1 "memstream.dev/go/memstream/v1"
)

const (
	inFlightMax = 64          // queries in flight, if the server does not announce a limit
	resendDelay = time.Second // before resending a standing query after a transient error, if the server gives none
)

// recallGraceMax limits the time for which a stream drains. A variable for the tests.
var recallGraceMax = time.Second

// Answer is the whole answer to a query.
type Answer struct {
	// Recollections are ranked, best first.
	Recollections []*v1.Recollection
	// WorkingMemory has the short-term fragments in order, including those that are also ranked.
	WorkingMemory []*v1.Fragment
	// Done has the revision that was read, what was considered, and the duration.
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

// pendingQuery is a query that has not ended.
type pendingQuery struct {
	number   int64
	query    *v1.RecallQuery
	parts    []*v1.Recollections
	answer   *Answer
	err      error
	changed  chan struct{}               // closed and replaced when the answer changes or the query fails
	standing bool                        // a standing query
	known    map[string]*v1.Recollection // what this connection has sent to a standing query, by id
}

func newPendingQuery(query *v1.RecallQuery) *pendingQuery {
	return &pendingQuery{query: proto.CloneOf(query), changed: make(chan struct{})}
}

// prepareResend prepares for resending, which returns the whole answer.
func (q *pendingQuery) prepareResend() { q.parts, q.known = nil, nil }

// completeAnswer completes the answer, or a change. It fails if that ranks a fragment that was never sent.
func (q *pendingQuery) completeAnswer(done *v1.RecallDone) error {
	answer := newAnswer(q.parts, done)
	q.parts = nil
	if q.standing {
		if err := q.rankAnswer(answer); err != nil {
			return err
		}
	}
	q.answer = answer
	q.signalChange()
	return nil
}

func (q *pendingQuery) failQuery(err error) {
	q.err = err
	q.signalChange()
}

func (q *pendingQuery) signalChange() {
	close(q.changed)
	q.changed = make(chan struct{})
}

// RecallStream is a stream of queries to one memory, created by [Memory.Recall]. Any number of goroutines may query;
// queries over the server's limit in flight are queued. An unanswered query is resent on the next connection.
type RecallStream struct {
	memory  *Memory
	session string
	cancel  context.CancelCauseFunc
	ended   chan struct{}
	callers *callers.Callers

	signal
	openQueries map[string]*pendingQuery
	toResend    []*pendingQuery // queries of an earlier connection that exceed this server's limit in flight
	outbox      []*v1.RecallRequest
	ids         int64
	inFlightMax int
	connections int
	connected   bool
	closing     bool
	draining    bool
	err         error
}

// Recall opens a stream of queries and returns when the server has answered. The queries are made for the session, if it
// is not empty. The end of ctx ends the stream, which then fails with CANCELLED or DEADLINE_EXCEEDED.
func (m *Memory) Recall(ctx context.Context, session string) (*RecallStream, error) {
	ctx, cancel := m.client.streamContext(withRoute(ctx, m.String()))
	ctx, asking := callers.With(ctx)
	stream := &RecallStream{
		memory: m, session: session, cancel: cancel, ended: make(chan struct{}), callers: asking, signal: newSignal(),
		openQueries: map[string]*pendingQuery{}, inFlightMax: inFlightMax,
	}
	go stream.runConnections(ctx)
	stream.lock()
	defer stream.unlock()
	if err := stream.waitUntil(ctx, func() bool { return stream.connections > 0 }); err != nil {
		cancel(ErrClosed)
		return nil, err
	}
	return stream, nil
}

// Query sends a query and waits for the answer; the stream sets the query's id. The end of ctx cancels only this query. A
// context without a deadline gets the client's timeout. The query carries the time limit, so that the server stops working
// on it then; a timeout that the query already has is kept.
func (s *RecallStream) Query(ctx context.Context, query *v1.RecallQuery) (*Answer, error) {
	if query.GetSubscribe() {
		return nil, invalidField("query.subscribe", "is set: use Subscribe for a standing query")
	}
	asked := newPendingQuery(query)
	if err := s.askAndWait(ctx, asked); err != nil {
		return nil, err
	}
	return asked.answer, nil
}

// Connections returns the number of connections opened so far.
func (s *RecallStream) Connections() int {
	s.lock()
	defer s.unlock()
	return s.connections
}

// Close waits until the queries in flight are answered, then ends the stream and its standing queries.
func (s *RecallStream) Close(ctx context.Context) error {
	defer s.Abandon()
	s.lock()
	defer s.unlock()
	s.closing = true
	if err := s.waitUntil(ctx, func() bool { return !s.hasUnanswered() }); err != nil {
		return err
	}
	if s.connected && !s.draining {
		s.pushRequest(&v1.RecallRequest{Message: &v1.RecallRequest_Close{Close: &v1.RecallClose{}}})
		return s.waitUntil(ctx, func() bool { return !s.connected })
	}
	return nil // no query is unanswered, so there is no need to reconnect
}

// Abandon ends the stream and cancels its queries.
func (s *RecallStream) Abandon() {
	s.cancel(ErrClosed)
	<-s.ended
}

// askAndWait sends the query and waits for the first answer. It cancels the query at the end of ctx, or after the client's
// timeout if ctx has no deadline.
func (s *RecallStream) askAndWait(ctx context.Context, asked *pendingQuery) error {
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
	if err := s.sendQuery(ctx, asked); err != nil {
		return err
	}
	for asked.answer == nil && asked.err == nil {
		if err := s.waitFor(ctx, asked.changed); err != nil {
			s.cancelQuery(asked)
			return err
		}
	}
	if asked.answer != nil {
		return nil
	}
	return asked.err
}

func (s *RecallStream) sendQuery(ctx context.Context, asked *pendingQuery) error {
	if err := s.waitUntil(ctx, func() bool { return s.closing || len(s.openQueries) < s.inFlightMax }); err != nil {
		return err
	}
	if err := s.checkUsable(); err != nil {
		return err
	}
	s.ids++
	asked.number, asked.query.QueryId = s.ids, strconv.FormatInt(s.ids, 10)
	s.openQueries[asked.query.GetQueryId()] = asked
	s.callers.Set(asked.query.GetQueryId(), ctx)
	s.pushRequest(&v1.RecallRequest{Message: &v1.RecallRequest_Query{Query: asked.query}})
	return nil
}

// cancelQuery cancels a query that has not ended, also on the server; call it with the lock held.
func (s *RecallStream) cancelQuery(asked *pendingQuery) {
	id := asked.query.GetQueryId()
	if s.openQueries[id] == nil {
		return
	}
	s.forget(id)
	if index := slices.Index(s.toResend, asked); index >= 0 {
		s.toResend = slices.Delete(s.toResend, index, index+1)
	} else {
		s.pushRequest(&v1.RecallRequest{Message: &v1.RecallRequest_Cancel{Cancel: &v1.RecallCancel{QueryId: id}}})
	}
	s.notify()
}

// forget removes a query that has ended; call it with the lock held.
func (s *RecallStream) forget(id string) {
	delete(s.openQueries, id)
	s.callers.Delete(id)
}

// notify wakes all waiters, and resends queries while there is room.
func (s *RecallStream) notify() {
	s.signal.notify()
	for len(s.toResend) > 0 && len(s.openQueries)-len(s.toResend) < s.inFlightMax {
		next := s.toResend[0]
		s.toResend = s.toResend[1:]
		s.pushRequest(&v1.RecallRequest{Message: &v1.RecallRequest_Query{Query: next.query}})
	}
}

// pushRequest passes a request to the writer, except while draining: the next connection resends the open queries.
func (s *RecallStream) pushRequest(request *v1.RecallRequest) {
	if !s.draining && s.connected {
		s.outbox = append(s.outbox, request)
	}
	s.signal.notify()
}

// hasUnanswered reports whether a query waits for its first answer.
func (s *RecallStream) hasUnanswered() bool {
	for _, asked := range s.openQueries {
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

func (s *RecallStream) waitUntil(ctx context.Context, ready func() bool) error {
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

func (s *RecallStream) runConnections(ctx context.Context) {
	defer close(s.ended)
	defer s.cancel(ErrClosed)
	retry := newBackoff(s.memory.client.options.retry)
	err := repeatUntilDone(ctx, retry, func() error { return s.runConnection(ctx, retry) })
	if err == nil {
		err = ErrClosed
	}
	s.lock()
	defer s.unlock()
	s.err = err
	for id, asked := range s.openQueries {
		s.forget(id)
		asked.failQuery(err)
	}
	s.toResend = nil
	s.notify()
}

func (s *RecallStream) runConnection(ctx context.Context, retry *backoff) error {
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
	call, err := s.openConnection(ctx)
	if err != nil {
		close(writing)
		return err
	}
	retry.markOpened()
	go func() {
		defer close(writing)
		s.writeRequests(ctx, call)
	}()
	for {
		response, err := call.Recv()
		if errors.Is(err, io.EOF) {
			s.lock()
			defer s.unlock()
			if s.closing && !s.hasUnanswered() {
				return nil
			}
			return unavailableError("the server ended the stream")
		}
		if err != nil {
			return err
		}
		answered, err := s.handleResponse(response, cancel)
		if answered {
			retry.markProgress()
		}
		if err != nil {
			return err
		}
	}
}

func (s *RecallStream) openConnection(ctx context.Context) (v1.StreamService_RecallClient, error) {
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
			err = unavailableError("the server ended the stream")
		}
		return nil, err
	}
	if going := response.GetGoingAway(); going != nil {
		return nil, shuttingDownError(going)
	}
	if response.GetOpened() == nil {
		return nil, notOpenedError(response)
	}
	s.lock()
	defer s.unlock()
	s.memory.client.conn.allowCalls(int(response.GetOpened().GetLimits().GetConnectionStreamsMax()))
	s.inFlightMax = cmp.Or(int(response.GetOpened().GetLimits().GetQueriesInFlightMax()), inFlightMax)
	s.draining, s.connected, s.outbox = false, true, nil
	s.connections++
	for _, asked := range s.openQueries {
		asked.prepareResend()
	}
	s.toResend = slices.SortedFunc(maps.Values(s.openQueries), func(one, other *pendingQuery) int {
		return cmp.Compare(one.number, other.number)
	})
	s.notify()
	return call, nil
}

// handleResponse handles one response and reports whether it answered a query. It fails with SHUTTING_DOWN when it is time
// to reconnect.
func (s *RecallStream) handleResponse(response *v1.RecallResponse, cancel context.CancelFunc) (answered bool, err error) {
	s.lock()
	defer s.unlock()
	switch message := response.GetMessage().(type) {
	case *v1.RecallResponse_Recollections:
		if asked := s.openQueries[message.Recollections.GetQueryId()]; asked != nil {
			asked.parts = append(asked.parts, message.Recollections)
		}
		answered, err = s.completeQuery(message.Recollections.GetDone())
	case *v1.RecallResponse_Done: // from an older server
		answered, err = s.completeQuery(message.Done)
	case *v1.RecallResponse_Failed:
		answered = true
		s.failQuery(message.Failed)
	case *v1.RecallResponse_GoingAway:
		// Queries are safe to repeat: those not answered during the grace period go to the next server.
		s.draining = true
		time.AfterFunc(min(message.GoingAway.GetGrace().AsDuration(), recallGraceMax), cancel)
	}
	if err == nil && s.draining && !s.hasUnanswered() {
		err = shuttingDownError(response.GetGoingAway())
	}
	return answered, err
}

// completeQuery completes the answer of a query and reports whether done is set.
func (s *RecallStream) completeQuery(done *v1.RecallDone) (bool, error) {
	if done == nil {
		return false, nil
	}
	if asked := s.openQueries[done.GetQueryId()]; asked != nil {
		if err := asked.completeAnswer(done); err != nil {
			return false, err
		}
		if !asked.standing {
			s.forget(done.GetQueryId())
		}
		s.notify()
	}
	return true, nil
}

// failQuery ends a query that failed. A standing query that had an answer is resent after a transient error.
func (s *RecallStream) failQuery(failed *v1.RecallFailed) {
	id := failed.GetQueryId()
	asked, err := s.openQueries[id], fromStatus(failed.GetStatus())
	if asked == nil {
		return
	}
	if asked.standing && asked.answer != nil && isCut(err) {
		connection := s.connections
		time.AfterFunc(cmp.Or(err.RetryAfter, resendDelay), func() { s.resendStanding(asked, connection) })
		return
	}
	s.forget(id)
	asked.failQuery(err)
	s.notify()
}

// resendStanding resends a standing query, unless a new connection has done so.
func (s *RecallStream) resendStanding(asked *pendingQuery, connection int) {
	s.lock()
	defer s.unlock()
	if s.openQueries[asked.query.GetQueryId()] == asked && s.connections == connection && s.connected {
		asked.prepareResend()
		s.pushRequest(&v1.RecallRequest{Message: &v1.RecallRequest_Query{Query: asked.query}})
	}
}

func (s *RecallStream) writeRequests(ctx context.Context, call v1.StreamService_RecallClient) {
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
