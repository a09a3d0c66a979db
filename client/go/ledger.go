package memstream

import (
	"fmt"

	"google.golang.org/grpc/codes"

	v1 "memstream.dev/go/memstream/v1"
)

const (
	batchMax      = 128     // observations in one message; gRPC's cost is by the message, and more do not make it cheaper
	batchBytesMax = 1 << 20 // bytes of observations in one message; larger ones do not go faster
	messageBytes  = 4 << 20 // gRPC's own limit, where the server names none
	frameBytes    = 64      // around a lone observation in its message
	rejectedKept  = 1000
)

type item struct {
	sent        *Sent
	observation *v1.Observation
	size        int64
}

// line is items in order, and their bytes.
type line struct {
	items []item
	bytes int64
}

func (l *line) push(one item) {
	l.items = append(l.items, one)
	l.bytes += one.size
}

func (l *line) shift() item {
	one := l.items[0]
	l.items[0] = item{} // what is settled is not held
	l.items = l.items[1:]
	l.bytes -= one.size
	return one
}

// ledger is what a producer has said and the server has not yet stored: numbers, window, batches, acknowledgements.
// It does no I/O, and its owner locks.
//
// Rule 1: an observation gets its number once, in order, and keeps it over every connection.
// Rule 2: it is held until it is stored, and sent again on a new connection until it is received; the server knows a
// repeat by its number and content, so that it counts once.
// Rule 3: what is held and not received never exceeds the window granted, in observations and in bytes.
// Rule 4: what the server had received before a connection, and had not acknowledged, is settled by the answer to its
// repeat and not by its number: only that answer tells whether it was refused. A flush after the last repeat marks it.
// Rule 5: up to `stored` every refusal and outcome is known here. A new connection asks for those of later numbers and
// takes them before anything else, so that none is lost with a connection.
type ledger struct {
	received, stored, indexed, revision, last int64

	rejected      []*v1.RejectedObservation
	rejectedCount int64

	known              *int64 // what an earlier process of the producer knew
	resumption         *Resumption
	started            bool
	repeatsUpto        int64
	batchMax           int
	batchBytes         int64
	messageBytes       int64
	windowObservations int
	windowBytes        int64

	waiting map[int64]*Sent
	queue   line // to be sent on this connection
	flight  line // sent on it and not received
	kept    line // received and not stored, held in case the server loses them
	bare    line // as kept, but beyond the bytes worth holding: only their numbers are known
}

func newLedger(known *int64) *ledger {
	return &ledger{batchMax: batchMax, waiting: map[int64]*Sent{}, known: known}
}

// knownSequence is what to say to the server that is known here; nil where there is nothing to ask for.
func (l *ledger) knownSequence() *int64 {
	if l.started {
		return &l.stored
	}
	return l.known
}

// resumed takes all refusals and outcomes of before this connection that were asked for; it comes before opened.
func (l *ledger) resumed(
	opened *v1.ObserveOpened, rejected []*v1.RejectedObservation, outcomes []*v1.ObservationOutcome,
) {
	if l.started {
		l.refuse(rejected)
		l.note(outcomes)
		return
	}
	l.resumption = &Resumption{
		Rejected: rejected, Outcomes: outcomes,
		RejectedSince: opened.GetRejectedSince(), OutcomesSince: opened.GetOutcomesSince(),
	}
}

// opened: a connection is open; the first says where to go on numbering, later ones what to send again.
func (l *ledger) opened(opened *v1.ObserveOpened) error {
	l.grant(opened)
	if !l.started {
		l.started = true
		l.received, l.stored = opened.GetReceived(), opened.GetStored()
		l.last = max(opened.GetExpectedSequence(), 1) - 1
		l.revision = opened.GetRevision()
		return nil
	}
	if opened.GetExpectedSequence() > l.last+1 {
		return &Error{
			Code: codes.Aborted, Reason: v1.ErrorReason_ERROR_REASON_PRODUCER_SUPERSEDED,
			Message: fmt.Sprintf("observation %d is expected, but only %d were made here: another process uses this "+
				"producer's name", opened.GetExpectedSequence(), l.last),
		}
	}
	l.requeue(&l.flight, 0)
	l.repeatsUpto = 0
	if opened.GetReceived() > l.received {
		l.repeatsUpto = opened.GetReceived()
	}
	if opened.GetExpectedSequence() <= l.received {
		if err := l.rollBack(opened.GetExpectedSequence()); err != nil {
			return err
		}
	}
	// What was stored meanwhile is said here alone, of what repeats nothing yet: it may have been refused.
	l.revision = opened.GetRevision() // lower than it was where the server was restored
	l.store(min(opened.GetStored(), l.received))
	return nil
}

// sizeMax is the bytes of the largest observation that any window and message admits.
func (l *ledger) sizeMax() int64 { return min(l.windowBytes, l.messageBytes-frameBytes) }

// hasRoom says whether the window admits one more of that many bytes.
func (l *ledger) hasRoom(size int64) bool {
	return len(l.queue.items)+len(l.flight.items) < l.windowObservations &&
		l.queue.bytes+l.flight.bytes+size <= l.windowBytes
}

// add numbers an observation and queues it.
func (l *ledger) add(observation *v1.Observation, size int64) *Sent {
	l.last++
	sent := newSent(l.last)
	l.waiting[l.last] = sent
	l.queue.push(item{sent, observation, size})
	return sent
}

// nextBatch is what to send now, as much as the window and a message allow; nil when nothing may go.
func (l *ledger) nextBatch() *v1.ObservationBatch {
	var batch *v1.ObservationBatch
	var size int64
	for len(l.queue.items) > 0 {
		next := l.queue.items[0]
		if !l.mayFly(next) {
			break
		}
		if batch == nil {
			batch = &v1.ObservationBatch{FirstSequence: next.sent.Sequence}
		} else if len(batch.Observations) == l.batchMax || size+next.size > l.batchBytes ||
			batch.FirstSequence <= l.repeatsUpto && l.repeatsUpto < next.sent.Sequence {
			break
		}
		l.flight.push(l.queue.shift())
		batch.Observations = append(batch.Observations, next.observation)
		size += next.size
	}
	return batch
}

// repeatsSent says whether repeats on this connection are not settled, and all that may be sent are: time for the
// flush.
func (l *ledger) repeatsSent() bool {
	if len(l.queue.items) == 0 || l.queue.items[0].sent.Sequence > l.repeatsUpto {
		return l.repeatsUpto > 0
	}
	return !l.mayFly(l.queue.items[0]) // the window is smaller than it was when they were sent first
}

// repeatsSettled: the flush after the last repeat sent is answered.
func (l *ledger) repeatsSettled() {
	if len(l.queue.items) > 0 && l.queue.items[0].sent.Sequence <= l.repeatsUpto {
		l.receive(l.queue.items[0].sent.Sequence - 1)
	} else {
		l.repeatsUpto = 0
	}
}

func (l *ledger) position(level v1.AckLevel) int64 {
	switch level {
	case v1.AckLevel_ACK_LEVEL_RECEIVED:
		return l.received
	case v1.AckLevel_ACK_LEVEL_INDEXED:
		return l.indexed
	}
	return l.stored
}

// acknowledged takes an acknowledgement; repeated and outdated ones change nothing. Whether there was progress.
func (l *ledger) acknowledged(ack *v1.Ack) bool {
	l.refuse(ack.GetRejected())
	l.note(ack.GetOutcomes())
	l.revision = max(l.revision, ack.GetRevision())
	settled := ack.GetReceived()
	if l.repeatsUpto > 0 {
		settled = l.received
	}
	stored := min(ack.GetStored(), max(settled, l.received))
	progress := settled > l.received || stored > l.stored
	l.receive(settled)
	l.store(stored)
	l.indexed = max(l.indexed, min(ack.GetIndexed(), l.stored))
	return progress
}

func (l *ledger) refuse(all []*v1.RejectedObservation) {
	for _, refused := range all {
		if sent := l.waiting[refused.GetSequence()]; sent != nil && sent.refuse(fromStatus(refused.GetStatus())) {
			l.rejectedCount++
			if l.rejected = append(l.rejected, refused); len(l.rejected) > rejectedKept {
				l.rejected = l.rejected[1:]
			}
		}
	}
}

func (l *ledger) note(all []*v1.ObservationOutcome) {
	for _, outcome := range all {
		if sent := l.waiting[outcome.GetSequence()]; sent != nil {
			sent.outcome = outcome
		}
	}
}

// fail: the stream is over, and whoever waits for an observation is told.
func (l *ledger) fail(err error) {
	for _, sent := range l.waiting {
		sent.refuse(err)
	}
}

func (l *ledger) grant(opened *v1.ObserveOpened) {
	limits := opened.GetLimits()
	l.messageBytes = messageBytes
	l.batchBytes = batchBytesMax
	if most := int64(limits.GetMessageBytesMax()); most > 0 {
		l.messageBytes = most
		l.batchBytes = min(batchBytesMax, most/2) // half: the message has a frame around every observation
	}
	if most := int(limits.GetBatchMax()); most > 0 {
		l.batchMax = min(l.batchMax, most)
	}
	l.windowObservations = max(int(opened.GetWindowObservations()), 1)
	l.windowBytes = max(opened.GetWindowBytes(), 1)
}

func (l *ledger) mayFly(next item) bool {
	return len(l.flight.items) == 0 ||
		l.flight.bytes+next.size <= l.windowBytes && len(l.flight.items) < l.windowObservations
}

// requeue puts the items of a line, from one on, before what is queued.
func (l *ledger) requeue(from *line, start int) {
	again := line{items: append([]item(nil), from.items[start:]...)}
	for _, one := range again.items {
		again.bytes += one.size
	}
	from.items, from.bytes = from.items[:start], from.bytes-again.bytes
	l.queue = line{append(again.items, l.queue.items...), again.bytes + l.queue.bytes}
}

func (l *ledger) rollBack(expected int64) error {
	if len(l.kept.items) == 0 || l.kept.items[0].sent.Sequence > expected {
		return &ServerBehindError{ExpectedSequence: expected, Acknowledged: l.received}
	}
	l.requeue(&l.kept, int(expected-l.kept.items[0].sent.Sequence))
	l.received = expected - 1
	return nil
}

func (l *ledger) receive(upto int64) {
	for len(l.flight.items) > 0 && l.flight.items[0].sent.Sequence <= upto {
		l.kept.push(l.flight.shift())
		for l.kept.bytes > l.windowBytes {
			oldest := l.kept.shift()
			l.bare.push(item{sent: oldest.sent})
		}
	}
	l.received = max(l.received, upto)
}

func (l *ledger) store(upto int64) {
	for _, held := range []*line{&l.bare, &l.kept} {
		for len(held.items) > 0 && held.items[0].sent.Sequence <= upto {
			sent := held.shift().sent
			delete(l.waiting, sent.Sequence)
			sent.store(l.revision)
		}
	}
	l.stored = max(l.stored, upto)
}
