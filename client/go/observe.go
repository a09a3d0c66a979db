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

const graceMax = 30 * time.Second

// ObserveOptions are those of an Observe stream.
type ObserveOptions struct {
	// Session of observations that give none.
	Session string
	// AckLevel is what Flush waits for. Default STORED.
	AckLevel v1.AckLevel
	// Outcomes has the server say what became of each observation.
	Outcomes bool
	// KnownSequence is for a process that goes on where an earlier one of the producer ended: the last number up to which
	// that one had every refusal and, with Outcomes, every outcome; 0 for none. The server sends those of later numbers
	// again, which [ObserveStream.Resumption] has. Nil asks for none.
	KnownSequence *int64
}

// Resumption is what became of the numbers that an earlier process of the producer had sent.
type Resumption struct {
	// Rejected are those that were refused, after KnownSequence.
	Rejected []*v1.RejectedObservation
	// Outcomes are those of what is stored, after KnownSequence, if the stream asked for outcomes.
	Outcomes []*v1.ObservationOutcome
	// RejectedSince and OutcomesSince are the numbers from which on all are there: KnownSequence + 1, or more where the
	// server no longer has older ones.
	RejectedSince, OutcomesSince int64
}

// ObserveStream is a producer's stream into one memory; made by [Memory.Observe].
//
// One goroutine owns the call, reads it and opens the next one; a second one, the writer, lives as long as a
// connection and takes what it sends from the ledger. Only Close tells the server that the producer has finished.
type ObserveStream struct {
	memory   *Memory
	producer string
	options  ObserveOptions
	end      context.CancelCauseFunc
	over     chan struct{}
	turn     chan struct{} // holds whose turn it is to send: first come, first numbered

	signal
	ledger      *ledger
	err         error
	closing     bool
	closed      bool
	flushIDs    int64
	pauseUntil  time.Time
	connections int

	// Of the connection, set anew by each.
	repeatsFlush int64
	closeSent    bool
	draining     bool
}

// Observe opens a producer's stream and returns once the server has answered. The name is lasting and one process's
// at a time: the server remembers its numbers. ctx bounds the stream's whole life: its end abandons the stream, which
// then fails with CANCELLED or DEADLINE_EXCEEDED, and what was not received is not there.
func (m *Memory) Observe(ctx context.Context, producer string, options ObserveOptions) (*ObserveStream, error) {
	ctx, cancel := m.client.life(withRoute(ctx, m.String()))
	stream := &ObserveStream{
		memory: m, producer: producer, options: options, end: cancel, over: make(chan struct{}),
		turn: make(chan struct{}, 1), signal: newSignal(), ledger: newLedger(options.KnownSequence),
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

// ExpectedSequence is the number the next observation gets; after a restart, where to resume one's own source.
func (s *ObserveStream) ExpectedSequence() int64 {
	return locked(s, func() int64 { return s.ledger.last + 1 })
}

// Received: everything up to this number is durable, or was refused.
func (s *ObserveStream) Received() int64 { return locked(s, func() int64 { return s.ledger.received }) }

// Stored: everything up to this number is seen by every recall, or was refused.
func (s *ObserveStream) Stored() int64 { return locked(s, func() int64 { return s.ledger.stored }) }

// Indexed: everything up to this number is in the vector index, or needs none.
func (s *ObserveStream) Indexed() int64 { return locked(s, func() int64 { return s.ledger.indexed }) }

// Revision is the memory's that made Stored true: give it to a recall as min_revision.
func (s *ObserveStream) Revision() int64 { return locked(s, func() int64 { return s.ledger.revision }) }

// Resumption is what became of the producer's earlier numbers; nil unless ObserveOptions.KnownSequence was given.
func (s *ObserveStream) Resumption() *Resumption {
	return locked(s, func() *Resumption { return s.ledger.resumption })
}

// Connections counts those that were opened.
func (s *ObserveStream) Connections() int { return locked(s, func() int { return s.connections }) }

// Rejected are the latest 1,000 observations that were refused, and how many there were in all.
func (s *ObserveStream) Rejected() ([]*v1.RejectedObservation, int64) {
	s.lock()
	defer s.unlock()
	return append([]*v1.RejectedObservation(nil), s.ledger.rejected...), s.ledger.rejectedCount
}

func locked[T any](s *ObserveStream, read func() T) T {
	s.lock()
	defer s.unlock()
	return read()
}

// Send numbers an observation and hands it over; it waits only while the window is full. If it fails the observation
// was not taken. The observation must not be changed afterwards.
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
	// Another connection may grant less.
	ready := func() bool { return s.closing || s.ledger.hasRoom(size) || size > s.ledger.sizeMax() }
	if err := s.until(ctx, ready); err != nil {
		return nil, err
	}
	if err := s.checkTakes(size); err != nil {
		return nil, err
	}
	sent := s.ledger.add(observation, size)
	s.notify()
	return sent, nil
}

// Flush waits until everything sent so far has come to the stream's AckLevel. Refused observations do not fail it.
func (s *ObserveStream) Flush(ctx context.Context) error {
	s.lock()
	defer s.unlock()
	target := s.ledger.last
	reached := func() bool { return s.ledger.position(s.options.AckLevel) >= target }
	if reached() {
		return nil
	}
	if err := s.checkUsable(); err != nil {
		return err
	}
	// The server says unasked how far it has come: to ask would be a message more each way.
	return s.until(ctx, reached)
}

// Close flushes, tells the server that the producer has finished and returns when all is stored. The stream is over
// afterwards even where it fails.
func (s *ObserveStream) Close(ctx context.Context) error {
	defer s.Abandon()
	s.lock()
	defer s.unlock()
	s.closing = true
	s.notify()
	return s.until(ctx, func() bool { return s.closed })
}

// Abandon ends the stream without a word: what was not received is not there.
func (s *ObserveStream) Abandon() {
	s.end(ErrClosed)
	<-s.over
}

func (s *ObserveStream) checkUsable() error {
	if s.err == nil && s.closing {
		return ErrClosed
	}
	return s.err
}

func (s *ObserveStream) checkTakes(size int64) error {
	if err := s.checkUsable(); err != nil {
		return err
	}
	if most := s.ledger.sizeMax(); size > most {
		return invalid("observation", fmt.Sprintf("has %d bytes, the server takes at most %d", size, most))
	}
	return nil
}

// until waits for a condition, with the lock held.
func (s *ObserveStream) until(ctx context.Context, ready func() bool) error {
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

func (s *ObserveStream) run(ctx context.Context) {
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
	s.ledger.fail(err)
	s.notify()
}

func (s *ObserveStream) connection(ctx context.Context, retry *backoff) error {
	ctx, cancel := context.WithCancel(ctx) // leaving it would leave the server's handler open
	writing := make(chan struct{})
	defer func() {
		cancel()
		<-writing
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
			return unavailable("the server ended the stream")
		}
		if err != nil {
			return err
		}
		progress, finished, err := s.take(response, cancel)
		if progress {
			retry.progressed()
		}
		if finished {
			s.readEnd(call, cancel)
		}
		if err != nil || finished {
			return err
		}
	}
}

// readEnd lets a stream that is over end by itself, so that the server does not take it for cancelled; a second at
// most. Whatever the end is, everything was said before.
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

func (s *ObserveStream) open(ctx context.Context) (v1.StreamService_ObserveClient, error) {
	call, err := s.memory.client.Streams.Observe(ctx)
	if err != nil {
		return nil, err
	}
	// The level of the flush after repeats, the only one that is sent: that does not wait for the index.
	level := s.options.AckLevel
	if level == v1.AckLevel_ACK_LEVEL_INDEXED {
		level = v1.AckLevel_ACK_LEVEL_STORED
	}
	s.lock()
	known := s.ledger.knownSequence()
	if known != nil {
		known = proto.Int64(*known) // it changes
	}
	s.unlock()
	// What a broken Send says is io.EOF; Recv has the status.
	_ = call.Send(&v1.ObserveRequest{Message: &v1.ObserveRequest_Open{Open: &v1.ObserveOpen{
		Namespace: s.memory.Namespace, Memory: s.memory.Name, Producer: s.producer, Session: s.options.Session,
		AckLevel: level, Outcomes: s.options.Outcomes, KnownSequence: known,
	}}})
	response, err := answerToOpen(call)
	if err != nil {
		return nil, err
	}
	opened := response.GetOpened()
	if opened == nil {
		return nil, protocolViolation(fmt.Sprintf("the server answered open with %T", response.GetMessage()))
	}
	rejected, outcomes, err := readResumed(call, opened)
	if err != nil {
		return nil, err
	}
	s.lock()
	defer s.unlock()
	if known != nil {
		s.ledger.resumed(opened, rejected, outcomes)
	}
	if err := s.ledger.opened(opened); err != nil {
		return nil, err
	}
	s.repeatsFlush, s.closeSent, s.draining = 0, false, false
	s.connections++
	s.notify()
	return call, nil
}

// readResumed reads all that the server sends again, which comes before any other message.
func readResumed(
	call v1.StreamService_ObserveClient, opened *v1.ObserveOpened,
) (rejected []*v1.RejectedObservation, outcomes []*v1.ObservationOutcome, err error) {
	rejected, outcomes = opened.GetRejected(), opened.GetOutcomes()
	for resumed := opened.GetResumed(); resumed < opened.GetResumeTo(); {
		response, err := answerToOpen(call)
		if err != nil {
			return nil, nil, err
		}
		ack := response.GetAck()
		if ack.GetResumed() <= resumed {
			return nil, nil, protocolViolation(fmt.Sprintf(
				"the server resumed up to %d of %d, and then sent %T", resumed, opened.GetResumeTo(), response.GetMessage()))
		}
		rejected, outcomes = append(rejected, ack.GetRejected()...), append(outcomes, ack.GetOutcomes()...)
		resumed = ack.GetResumed()
	}
	return rejected, outcomes, nil
}

// answerToOpen reads the next message of a stream that is being opened.
func answerToOpen(call v1.StreamService_ObserveClient) (*v1.ObserveResponse, error) {
	response, err := call.Recv()
	if errors.Is(err, io.EOF) {
		return nil, unavailable("the server ended the stream")
	}
	if err != nil {
		return nil, err
	}
	if going := response.GetGoingAway(); going != nil {
		return nil, shuttingDown(going)
	}
	return response, nil
}

// take takes one answer. It fails with SHUTTING_DOWN when it is time to reconnect.
func (s *ObserveStream) take(
	response *v1.ObserveResponse, cancel context.CancelFunc,
) (progress, finished bool, err error) {
	s.lock()
	defer s.unlock()
	switch message := response.GetMessage().(type) {
	case *v1.ObserveResponse_Ack:
		if s.repeatsFlush > 0 && message.Ack.GetFlushed() >= s.repeatsFlush {
			s.repeatsFlush = 0
			s.ledger.repeatsSettled()
		}
		progress = s.ledger.acknowledged(message.Ack)
	case *v1.ObserveResponse_Closed:
		s.ledger.repeatsSettled() // nothing more will be said
		s.ledger.acknowledged(lastAck(message.Closed))
		progress, finished = true, true
	case *v1.ObserveResponse_Throttle:
		s.pauseUntil = time.Now().Add(message.Throttle.GetRetryDelay().AsDuration())
	case *v1.ObserveResponse_GoingAway:
		// What is in flight may still be acknowledged; what is queued goes over the next connection.
		s.draining = true
		time.AfterFunc(min(message.GoingAway.GetGrace().AsDuration(), graceMax), cancel)
	}
	s.notify()
	if s.draining && !s.closeSent && len(s.ledger.flight.items) == 0 {
		return progress, finished, shuttingDown(response.GetGoingAway())
	}
	return progress, finished, nil
}

func lastAck(closed *v1.ObserveClosed) *v1.Ack {
	return &v1.Ack{
		Received: closed.GetReceived(), Stored: closed.GetStored(), Revision: closed.GetRevision(),
		Rejected: closed.GetRejected(), Outcomes: closed.GetOutcomes(),
	}
}

func (s *ObserveStream) write(ctx context.Context, call v1.StreamService_ObserveClient) {
	for {
		request, err := s.nextRequest(ctx)
		if err != nil {
			return // the connection is over
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

// nextRequest waits for the next thing to say.
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
		if request := s.due(); request != nil {
			return request, nil
		}
		if err := s.wait(ctx); err != nil {
			return nil, err
		}
	}
}

func (s *ObserveStream) due() *v1.ObserveRequest {
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
