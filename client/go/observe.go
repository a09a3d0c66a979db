package memstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/protobuf/proto"

	v1 "memstream.dev/go/memstream/v1"
)

// graceMax limits the time for which a stream drains after the server has announced its shutdown.
const graceMax = 30 * time.Second

// ObserveOptions configures an Observe stream.
type ObserveOptions struct {
	// Session of observations that have none.
	Session string
	// AckLevel is the level that Flush waits for. Default STORED.
	AckLevel v1.AckLevel
	// Outcomes requests the outcome of each observation.
	Outcomes bool
	// Related names up to this many earlier statements near to the observation in each outcome, at most 10; it implies
	// Outcomes.
	Related int32
	// KnownSequence is for a process that continues an earlier process of the producer: the last number up to which that
	// process had every rejection and, with Outcomes, every outcome; 0 if it had none. The server resends those of later
	// numbers, and [ObserveStream.Resumption] returns them. Nil requests none.
	KnownSequence *int64
}

// Resumption has the results of the observations that an earlier process of the producer sent.
type Resumption struct {
	// Rejected are the rejections after KnownSequence.
	Rejected []*v1.RejectedObservation
	// Outcomes are the outcomes of stored observations after KnownSequence, if the stream was opened with Outcomes.
	Outcomes []*v1.ObservationOutcome
	// RejectedSince and OutcomesSince are the numbers from which the lists are complete: KnownSequence + 1, or more if the
	// server no longer has older ones.
	RejectedSince, OutcomesSince int64
}

// ObserveStream is a producer's stream into one memory, created by [Memory.Observe].
//
// One goroutine owns the connection: it reads the responses and reconnects. A second one, the writer, runs for the
// duration of a connection and builds requests from the ledger when it sends them, so that a broken connection loses none.
// Only Close tells the server that the producer has finished.
type ObserveStream struct {
	memory   *Memory
	producer string
	options  ObserveOptions
	cancel   context.CancelCauseFunc
	ended    chan struct{}
	turn     chan struct{} // held while sending: first come, first numbered

	signal
	ledger      *ledger
	err         error
	closing     bool
	closed      bool
	flushIDs    int64
	pauseUntil  time.Time
	waiting     string
	connections int

	// State of the current connection.
	repeatsFlush int64
	closeSent    bool
	draining     bool
}

// Observe opens a producer's stream and returns when the server has answered. Keep the producer's name across restarts, and
// use it in one process at a time: the server remembers its numbers. The end of ctx abandons the stream, which then fails
// with CANCELLED or DEADLINE_EXCEEDED; observations that were not received are lost.
func (m *Memory) Observe(ctx context.Context, producer string, options ObserveOptions) (*ObserveStream, error) {
	ctx, cancel := m.client.streamContext(withRoute(ctx, m.String()))
	stream := &ObserveStream{
		memory: m, producer: producer, options: options, cancel: cancel, ended: make(chan struct{}),
		turn: make(chan struct{}, 1), signal: newSignal(), ledger: newLedger(options.KnownSequence),
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

// ExpectedSequence returns the number of the next observation; after a restart, the position at which to resume reading
// your source.
func (s *ObserveStream) ExpectedSequence() int64 {
	return readLocked(s, func() int64 { return s.ledger.last + 1 })
}

// Received returns the number up to which everything is durable, or rejected.
func (s *ObserveStream) Received() int64 {
	return readLocked(s, func() int64 { return s.ledger.received })
}

// Stored returns the number up to which everything is visible to every recall, or rejected.
func (s *ObserveStream) Stored() int64 { return readLocked(s, func() int64 { return s.ledger.stored }) }

// Indexed returns the number up to which everything is in the vector index, or needs none.
func (s *ObserveStream) Indexed() int64 {
	return readLocked(s, func() int64 { return s.ledger.indexed })
}

// Revision returns the memory's revision at Stored: pass it to a recall as min_revision.
func (s *ObserveStream) Revision() int64 {
	return readLocked(s, func() int64 { return s.ledger.revision })
}

// Resumption returns the results of the producer's earlier numbers; nil unless ObserveOptions.KnownSequence was set.
func (s *ObserveStream) Resumption() *Resumption {
	return readLocked(s, func() *Resumption { return s.ledger.resumption })
}

// Connections returns the number of connections opened so far.
func (s *ObserveStream) Connections() int { return readLocked(s, func() int { return s.connections }) }

// Waiting says why nothing moves now: the server's reason for a pause (a full disk or backlog, for instance), or the error
// after which the stream reconnects. It is empty while the stream moves.
func (s *ObserveStream) Waiting() string { return readLocked(s, func() string { return s.waiting }) }

// Rejected returns the latest 1,000 rejected observations, and the number of all rejected ones.
func (s *ObserveStream) Rejected() ([]*v1.RejectedObservation, int64) {
	s.lock()
	defer s.unlock()
	return append([]*v1.RejectedObservation(nil), s.ledger.rejected...), s.ledger.rejectedCount
}

func readLocked[T any](s *ObserveStream, read func() T) T {
	s.lock()
	defer s.unlock()
	return read()
}

// Send numbers and queues an observation; it waits only while the window is full. If it fails, the observation is not
// queued. Do not change the observation afterwards.
func (s *ObserveStream) Send(ctx context.Context, observation *v1.Observation) (*Sent, error) {
	size := int64(proto.Size(observation))
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		return nil, AsError(ctx.Err())
	}
	s.lock()
	defer s.unlock()
	// A later connection may grant a smaller window.
	ready := func() bool { return s.closing || s.ledger.hasRoom(size) || size > s.ledger.sizeMax() }
	if err := s.waitUntil(ctx, ready); err != nil {
		return nil, err
	}
	if err := s.checkAccepts(size); err != nil {
		return nil, err
	}
	sent := s.ledger.addObservation(observation, size)
	s.notify()
	return sent, nil
}

// Flush waits until everything sent so far has reached the stream's AckLevel. Rejected observations do not fail it.
func (s *ObserveStream) Flush(ctx context.Context) error {
	s.lock()
	defer s.unlock()
	target := s.ledger.last
	reached := func() bool { return s.ledger.acknowledgedUpTo(s.options.AckLevel) >= target }
	if reached() {
		return nil
	}
	if err := s.checkUsable(); err != nil {
		return err
	}
	// The server acknowledges unasked: a flush request would cost one more message each way.
	return s.waitUntil(ctx, reached)
}

// Close flushes, tells the server that the producer has finished and returns when everything is stored. The stream has
// ended afterwards, even if Close fails.
func (s *ObserveStream) Close(ctx context.Context) error {
	defer s.Abandon()
	s.lock()
	defer s.unlock()
	s.closing = true
	s.notify()
	return s.waitUntil(ctx, func() bool { return s.closed })
}

// Abandon ends the stream without flushing: observations that were not received are lost.
func (s *ObserveStream) Abandon() {
	s.cancel(ErrClosed)
	<-s.ended
}

func (s *ObserveStream) checkUsable() error {
	if s.err == nil && s.closing {
		return ErrClosed
	}
	return s.err
}

func (s *ObserveStream) checkAccepts(size int64) error {
	if err := s.checkUsable(); err != nil {
		return err
	}
	if most := s.ledger.sizeMax(); size > most {
		return invalidField("observation", fmt.Sprintf("has %d bytes, the server takes at most %d", size, most))
	}
	return nil
}

// waitUntil waits for a condition; call it with the lock held.
func (s *ObserveStream) waitUntil(ctx context.Context, ready func() bool) error {
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

func (s *ObserveStream) runConnections(ctx context.Context) {
	defer close(s.ended)
	defer s.cancel(ErrClosed)
	retry := newBackoff(s.memory.client.options.retry)
	err := repeatUntilDone(ctx, retry, func() error {
		err := s.runConnection(ctx, retry)
		if err != nil {
			s.lock()
			s.waiting = AsError(err).Error()
			s.unlock()
		}
		return err
	})
	if err == nil {
		err = ErrClosed
	}
	s.lock()
	defer s.unlock()
	s.err = err
	s.ledger.failPending(err)
	s.notify()
}

func (s *ObserveStream) runConnection(ctx context.Context, retry *backoff) error {
	ctx, cancel := context.WithCancel(ctx) // returning without cancel would leave the server's handler open
	writing := make(chan struct{})
	defer func() {
		cancel()
		<-writing
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
			return unavailableError("the server ended the stream")
		}
		if err != nil {
			return err
		}
		progress, finished, err := s.handleResponse(response, cancel)
		if progress {
			retry.markProgress()
		}
		if finished {
			s.readEnd(call, cancel)
		}
		if err != nil || finished {
			return err
		}
	}
}

// readEnd reads the end of a finished stream, so that the server does not count it as cancelled; it waits at most one
// second. The last message has settled everything, so the status of the end does not matter.
func (s *ObserveStream) readEnd(call v1.StreamService_ObserveClient, cancel context.CancelFunc) {
	late := time.AfterFunc(time.Second, cancel)
	defer late.Stop()
	for {
		if _, err := call.Recv(); err != nil {
			break
		}
	}
	s.lock()
	defer s.unlock()
	s.closed = true
	s.notify()
}

func (s *ObserveStream) openConnection(ctx context.Context) (v1.StreamService_ObserveClient, error) {
	call, err := s.memory.client.Streams.Observe(ctx)
	if err != nil {
		return nil, err
	}
	// AckLevel applies to the flush after repeats, the only one sent; it must not wait for the index.
	level := s.options.AckLevel
	if level == v1.AckLevel_ACK_LEVEL_INDEXED {
		level = v1.AckLevel_ACK_LEVEL_STORED
	}
	s.lock()
	known := s.ledger.knownSequence()
	if known != nil {
		known = proto.Int64(*known) // a copy, because the ledger changes it
	}
	s.unlock()
	// Send on a broken stream returns io.EOF; Recv returns the status.
	_ = call.Send(&v1.ObserveRequest{Message: &v1.ObserveRequest_Open{Open: &v1.ObserveOpen{
		Namespace: s.memory.Namespace, Memory: s.memory.Name, Producer: s.producer, Session: s.options.Session,
		AckLevel: level, Outcomes: s.options.Outcomes || s.options.Related > 0, KnownSequence: known,
		Related: s.options.Related,
	}}})
	response, err := readAnswerToOpen(call)
	if err != nil {
		return nil, err
	}
	opened := response.GetOpened()
	if opened == nil {
		return nil, notOpenedError(response)
	}
	s.memory.client.conn.allowCalls(int(opened.GetLimits().GetConnectionStreamsMax()))
	rejected, outcomes, err := readResumption(call, opened)
	if err != nil {
		return nil, err
	}
	s.lock()
	defer s.unlock()
	if known != nil {
		s.ledger.applyResumption(opened, rejected, outcomes)
	}
	if err := s.ledger.applyOpened(opened); err != nil {
		return nil, err
	}
	s.repeatsFlush, s.closeSent, s.draining = 0, false, false
	s.connections++
	s.notify()
	return call, nil
}

// readResumption reads the rejections and outcomes that the server resends before any other message.
func readResumption(
	call v1.StreamService_ObserveClient, opened *v1.ObserveOpened,
) (rejected []*v1.RejectedObservation, outcomes []*v1.ObservationOutcome, err error) {
	rejected, outcomes = opened.GetRejected(), opened.GetOutcomes()
	for resumed := opened.GetResumed(); resumed < opened.GetResumeTo(); {
		response, err := readAnswerToOpen(call)
		if err != nil {
			return nil, nil, err
		}
		ack := response.GetAck()
		if ack.GetResumed() <= resumed {
			return nil, nil, protocolViolationError(fmt.Sprintf(
				"the server resumed up to %d of %d, and no further", resumed, opened.GetResumeTo()))
		}
		rejected, outcomes = append(rejected, ack.GetRejected()...), append(outcomes, ack.GetOutcomes()...)
		resumed = ack.GetResumed()
	}
	return rejected, outcomes, nil
}

// readAnswerToOpen reads the next message of a stream that is being opened.
func readAnswerToOpen(call v1.StreamService_ObserveClient) (*v1.ObserveResponse, error) {
	response, err := call.Recv()
	if errors.Is(err, io.EOF) {
		return nil, unavailableError("the server ended the stream")
	}
	if err != nil {
		return nil, err
	}
	if going := response.GetGoingAway(); going != nil {
		return nil, shuttingDownError(going)
	}
	return response, nil
}

// handleResponse handles one response. It fails with SHUTTING_DOWN when it is time to reconnect.
func (s *ObserveStream) handleResponse(
	response *v1.ObserveResponse, cancel context.CancelFunc,
) (progress, finished bool, err error) {
	s.lock()
	defer s.unlock()
	switch message := response.GetMessage().(type) {
	case *v1.ObserveResponse_Ack:
		if s.repeatsFlush > 0 && message.Ack.GetFlushed() >= s.repeatsFlush {
			s.repeatsFlush = 0
			s.ledger.settleRepeats()
		}
		progress = s.ledger.applyAck(message.Ack)
	case *v1.ObserveResponse_Closed:
		s.ledger.settleRepeats() // no further acknowledgement follows
		s.ledger.applyAck(lastAck(message.Closed))
		progress, finished = true, true
	case *v1.ObserveResponse_Throttle:
		s.waiting = message.Throttle.GetDescription()
		s.pauseUntil = time.Now().Add(message.Throttle.GetRetryDelay().AsDuration())
	case *v1.ObserveResponse_GoingAway:
		// The server may still acknowledge what is in flight; the next connection sends the queue.
		s.draining = true
		time.AfterFunc(min(message.GoingAway.GetGrace().AsDuration(), graceMax), cancel)
	}
	if progress {
		s.waiting = ""
	}
	s.notify()
	if s.draining && !s.closeSent && len(s.ledger.flight.items) == 0 {
		return progress, finished, shuttingDownError(response.GetGoingAway())
	}
	return progress, finished, nil
}

func lastAck(closed *v1.ObserveClosed) *v1.Ack {
	return &v1.Ack{
		Received: closed.GetReceived(), Stored: closed.GetStored(), Revision: closed.GetRevision(),
		Rejected: closed.GetRejected(), Outcomes: closed.GetOutcomes(),
	}
}

func (s *ObserveStream) writeRequests(ctx context.Context, call v1.StreamService_ObserveClient) {
	for {
		request, err := s.nextRequest(ctx)
		if err != nil {
			return // the connection has ended
		}
		if err := call.Send(request); err != nil {
			return // the reader gets the status
		}
		if request.GetClose() != nil {
			_ = call.CloseSend() // nothing may follow, and the server need not wait for more
			return
		}
	}
}

// nextRequest waits for the next request to send.
func (s *ObserveStream) nextRequest(ctx context.Context) (*v1.ObserveRequest, error) {
	s.lock()
	defer s.unlock()
	for {
		if pause := time.Until(s.pauseUntil); pause > 0 {
			s.unlock()
			select {
			case <-time.After(pause):
			case <-ctx.Done():
			}
			s.lock()
		}
		if request := s.dueRequest(); request != nil {
			return request, nil
		}
		if err := s.wait(ctx); err != nil {
			return nil, err
		}
	}
}

// dueRequest returns the request to send now; nil if there is none.
func (s *ObserveStream) dueRequest() *v1.ObserveRequest {
	if s.draining || s.closeSent {
		return nil
	}
	if s.ledger.repeatsSent() && s.repeatsFlush == 0 {
		s.flushIDs++
		s.repeatsFlush = s.flushIDs
		flush := &v1.ObserveFlush{FlushId: s.repeatsFlush}
		return &v1.ObserveRequest{Message: &v1.ObserveRequest_Flush{Flush: flush}}
	}
	if batch := s.ledger.nextBatch(); batch != nil {
		return &v1.ObserveRequest{Message: &v1.ObserveRequest_Batch{Batch: batch}}
	}
	if len(s.ledger.queue.items) > 0 {
		return nil
	}
	if s.closing {
		s.closeSent = true
		return &v1.ObserveRequest{Message: &v1.ObserveRequest_Close{Close: &v1.ObserveClose{}}}
	}
	return nil
}
