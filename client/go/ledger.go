package memstream

import (
	"fmt"

	"google.golang.org/grpc/codes"

	v1 "memstream.dev/go/memstream/v1"
)

const (
	batchMax      = 128     // observations in one message; gRPC's cost is per message, and larger batches are not cheaper
	batchBytesMax = 1 << 20 // bytes of observations in one message; larger messages are not faster
	messageBytes  = 4 << 20 // gRPC's default limit, if the server names none
	frameBytes    = 64      // overhead of a message with one observation
	rejectedKept  = 1000    // rejections that a stream keeps
)

// item is a numbered observation and its size on the wire in bytes.
type item struct {
	sent        *Sent
	observation *v1.Observation
	size        int64
}

// itemQueue is a first-in, first-out queue of items and the sum of their bytes.
type itemQueue struct {
	items []item
	bytes int64
}

func (l *itemQueue) push(one item) {
	l.items = append(l.items, one)
	l.bytes += one.size
}

func (l *itemQueue) shift() item {
	one := l.items[0]
	l.items[0] = item{} // lets the observation be freed
	l.items = l.items[1:]
	l.bytes -= one.size
	return one
}

// ledger tracks the observations of a producer that are not yet stored: numbers, window, batches, acknowledgements.
// It does no I/O; the caller holds the stream's lock.
//
// Rule 1: an observation gets its number once, in order, and keeps it across connections.
// Rule 2: an observation is buffered until it is stored, and resent on each new connection until it is received. The
// server recognises a repeat by number and content, so that it counts once.
// Rule 3: the observations buffered but not received never exceed the granted window, in count and in bytes.
// Rule 4: an observation that the server had received before this connection, without acknowledging it, is settled by the
// answer to its repeat, not by its number: only that answer says whether it was rejected. A flush after the last repeat
// marks that point.
// Rule 5: up to `stored`, every rejection and outcome is known here. A new connection requests those of later numbers and
// reads them first, so that a lost connection loses none.
type ledger struct {
	received, stored, indexed, revision, last int64

	rejected      []*v1.RejectedObservation
	rejectedCount int64

	known              *int64 // the last number whose result an earlier process of the producer knew
	resumption         *Resumption
	started            bool
	repeatsUpto        int64
	batchMax           int
	batchBytes         int64
	messageBytes       int64
	windowObservations int
	windowBytes        int64

	pending map[int64]*Sent // by number, until stored
	queue   itemQueue       // to send on this connection
	flight  itemQueue       // sent on this connection, not received
	kept    itemQueue       // received, not stored, buffered in case the server loses them
	bare    itemQueue       // as kept, but over the byte limit of the buffer, so only their numbers are known
}

func newLedger(known *int64) *ledger {
	return &ledger{batchMax: batchMax, pending: map[int64]*Sent{}, known: known}
}

// knownSequence returns the known_sequence of `open`; nil requests nothing.
func (l *ledger) knownSequence() *int64 {
	if l.started {
		return &l.stored
	}
	return l.known
}

// applyResumption records the rejections and outcomes requested by known_sequence; call it before applyOpened.
func (l *ledger) applyResumption(
	opened *v1.ObserveOpened, rejected []*v1.RejectedObservation, outcomes []*v1.ObservationOutcome,
) {
	if l.started {
		l.rejectItems(rejected)
		l.recordOutcomes(outcomes)
		return
	}
	l.resumption = &Resumption{
		Rejected: rejected, Outcomes: outcomes,
		RejectedSince: opened.GetRejectedSince(), OutcomesSince: opened.GetOutcomesSince(),
	}
}

// applyOpened handles an opened connection: the first sets the next number, later ones decide what to resend. It fails with
// ServerBehindError if the server expects acknowledged numbers that are no longer buffered, with PRODUCER_SUPERSEDED if
// another process has used numbers of this producer.
func (l *ledger) applyOpened(opened *v1.ObserveOpened) error {
	l.setWindow(opened)
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
	l.requeueItems(&l.flight, 0)
	l.repeatsUpto = 0
	if opened.GetReceived() > l.received {
		l.repeatsUpto = opened.GetReceived()
	}
	if opened.GetExpectedSequence() <= l.received {
		if err := l.rollBack(opened.GetExpectedSequence()); err != nil {
			return err
		}
	}
	// Only this message reports what was stored meanwhile. Not for repeats: they may have been rejected.
	l.revision = opened.GetRevision() // lower than before if the server was restored
	l.markStored(min(opened.GetStored(), l.received))
	return nil
}

// sizeMax returns the bytes of the largest observation that fits into an empty window and a message.
func (l *ledger) sizeMax() int64 { return min(l.windowBytes, l.messageBytes-frameBytes) }

// hasRoom reports whether the window has room for an observation of that many bytes.
func (l *ledger) hasRoom(size int64) bool {
	return len(l.queue.items)+len(l.flight.items) < l.windowObservations &&
		l.queue.bytes+l.flight.bytes+size <= l.windowBytes
}

// addObservation numbers an observation and queues it.
func (l *ledger) addObservation(observation *v1.Observation, size int64) *Sent {
	l.last++
	sent := newSent(l.last)
	l.pending[l.last] = sent
	l.queue.push(item{sent, observation, size})
	return sent
}

// nextBatch returns the next batch, as large as the window and a message allow; nil when nothing may be sent.
func (l *ledger) nextBatch() *v1.ObservationBatch {
	var batch *v1.ObservationBatch
	var size int64
	for len(l.queue.items) > 0 {
		next := l.queue.items[0]
		if !l.maySend(next) {
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

// repeatsSent reports whether all repeats that may be sent are sent but not settled: time to flush.
func (l *ledger) repeatsSent() bool {
	if len(l.queue.items) == 0 || l.queue.items[0].sent.Sequence > l.repeatsUpto {
		return l.repeatsUpto > 0
	}
	return !l.maySend(l.queue.items[0]) // the window has shrunk since they were first sent
}

// settleRepeats records the answer to the flush after the last repeat.
func (l *ledger) settleRepeats() {
	if len(l.queue.items) > 0 && l.queue.items[0].sent.Sequence <= l.repeatsUpto {
		l.markReceived(l.queue.items[0].sent.Sequence - 1)
	} else {
		l.repeatsUpto = 0
	}
}

// acknowledgedUpTo returns the number up to which everything has reached the level.
func (l *ledger) acknowledgedUpTo(level v1.AckLevel) int64 {
	switch level {
	case v1.AckLevel_ACK_LEVEL_RECEIVED:
		return l.received
	case v1.AckLevel_ACK_LEVEL_INDEXED:
		return l.indexed
	}
	return l.stored
}

// applyAck applies an acknowledgement and reports whether there was progress; repeated and outdated ones change nothing.
func (l *ledger) applyAck(ack *v1.Ack) bool {
	l.rejectItems(ack.GetRejected())
	l.recordOutcomes(ack.GetOutcomes())
	l.revision = max(l.revision, ack.GetRevision())
	settled := ack.GetReceived()
	if l.repeatsUpto > 0 {
		settled = l.received
	}
	stored := min(ack.GetStored(), max(settled, l.received))
	progress := settled > l.received || stored > l.stored
	l.markReceived(settled)
	l.markStored(stored)
	l.indexed = max(l.indexed, min(ack.GetIndexed(), l.stored))
	return progress
}

func (l *ledger) rejectItems(all []*v1.RejectedObservation) {
	for _, rejected := range all {
		if sent := l.pending[rejected.GetSequence()]; sent != nil && sent.markFailed(fromStatus(rejected.GetStatus())) {
			l.rejectedCount++
			if l.rejected = append(l.rejected, rejected); len(l.rejected) > rejectedKept {
				l.rejected = l.rejected[1:]
			}
		}
	}
}

func (l *ledger) recordOutcomes(all []*v1.ObservationOutcome) {
	for _, outcome := range all {
		if sent := l.pending[outcome.GetSequence()]; sent != nil {
			sent.outcome = outcome
		}
	}
}

// failPending ends the stream: every pending observation fails with err.
func (l *ledger) failPending(err error) {
	for _, sent := range l.pending {
		sent.markFailed(err)
	}
}

func (l *ledger) setWindow(opened *v1.ObserveOpened) {
	limits := opened.GetLimits()
	l.messageBytes = messageBytes
	l.batchBytes = batchBytesMax
	if most := int64(limits.GetMessageBytesMax()); most > 0 {
		l.messageBytes = most
		l.batchBytes = min(batchBytesMax, most/2) // half: the message adds overhead to every observation
	}
	if most := int(limits.GetBatchMax()); most > 0 {
		l.batchMax = min(l.batchMax, most)
	}
	l.windowObservations = max(int(opened.GetWindowObservations()), 1)
	l.windowBytes = max(opened.GetWindowBytes(), 1)
}

func (l *ledger) maySend(next item) bool {
	return len(l.flight.items) == 0 ||
		l.flight.bytes+next.size <= l.windowBytes && len(l.flight.items) < l.windowObservations
}

// requeueItems moves the items of a queue, from index start on, to the front of l.queue.
func (l *ledger) requeueItems(from *itemQueue, start int) {
	again := itemQueue{items: append([]item(nil), from.items[start:]...)}
	for _, one := range again.items {
		again.bytes += one.size
	}
	from.items, from.bytes = from.items[:start], from.bytes-again.bytes
	l.queue = itemQueue{append(again.items, l.queue.items...), again.bytes + l.queue.bytes}
}

func (l *ledger) rollBack(expected int64) error {
	if len(l.kept.items) == 0 || l.kept.items[0].sent.Sequence > expected {
		return &ServerBehindError{ExpectedSequence: expected, Acknowledged: l.received}
	}
	l.requeueItems(&l.kept, int(expected-l.kept.items[0].sent.Sequence))
	l.received = expected - 1
	return nil
}

func (l *ledger) markReceived(upto int64) {
	for len(l.flight.items) > 0 && l.flight.items[0].sent.Sequence <= upto {
		l.kept.push(l.flight.shift())
		for l.kept.bytes > l.windowBytes {
			oldest := l.kept.shift()
			l.bare.push(item{sent: oldest.sent})
		}
	}
	l.received = max(l.received, upto)
}

func (l *ledger) markStored(upto int64) {
	for _, held := range []*itemQueue{&l.bare, &l.kept} {
		for len(held.items) > 0 && held.items[0].sent.Sequence <= upto {
			sent := held.shift().sent
			delete(l.pending, sent.Sequence)
			sent.markStored(l.revision)
		}
	}
	l.stored = max(l.stored, upto)
}
