package main

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	memstream "memstream.dev/go"
	v1 "memstream.dev/go/memstream/v1"
)

// retry is patient: a server takes its time to start, more of it on a busy machine.
var retry = memstream.Retry{
	Calls: time.Minute, First: time.Minute, DelayMin: 10 * time.Millisecond, DelayMax: 200 * time.Millisecond,
}

// runClientStep runs a step of the client under test; tests/conformance/clients.py is the Python equivalent.
func runClientStep(address string, step object) error {
	connected, err := memstream.Connect(address, memstream.WithRetry(retry))
	if err != nil {
		return err
	}
	defer connected.Close() //nolint:errcheck // no call is open any more
	memory, err := connected.Memory(step["memory"].(string))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	one := &clientStep{object: step, address: address, client: connected, memory: memory}
	one.producer, _ = step["producer"].(string)
	upto, _ := step["upto"].(float64)
	one.upto = int64(upto)
	switch step["client"] {
	case "observe":
		return one.observe(ctx)
	case "flush":
		return one.flush(ctx)
	case "listed":
		return one.listFragments(ctx)
	case "refused":
		return one.rejectOne(ctx)
	case "outcomes":
		return one.checkOutcomes(ctx)
	case "recall":
		return one.recall(ctx)
	case "stand":
		return one.subscribe(ctx)
	case "give up":
		return one.cancelQuery(ctx)
	case "watch":
		return one.watch(ctx)
	case "no memory":
		return one.useMissingMemory(ctx)
	case "too large":
		return one.sendTooLarge(ctx)
	case "late":
		return one.exceedDeadline(ctx)
	case "unknown values":
		return one.readUnknownValues(ctx)
	case "details":
		return one.checkDetails(ctx)
	case "away":
		return one.callWhileAway(ctx)
	case "abort":
		return one.cancelWhileDown(ctx)
	case "renew":
		return one.renewToken(ctx)
	}
	return fmt.Errorf("there is no step %v", step["client"])
}

type clientStep struct {
	object
	address  string
	client   *memstream.Client
	memory   *memstream.Memory
	producer string
	upto     int64
}

func (c *clientStep) contentOf(number int64) string {
	return fmt.Sprintf("word%d of %s", number, c.producer)
}

// askAt asks for the fault that the step has at this number, if any.
func (c *clientStep) askAt(number int64) error {
	if what, ok := c.object["at"].(object)[fmt.Sprint(number)].(string); ok {
		return requestFault(what)
	}
	return nil
}

func (c *clientStep) observe(ctx context.Context) error {
	stream, err := c.memory.Observe(ctx, c.producer, memstream.ObserveOptions{})
	if err != nil {
		return err
	}
	defer stream.Abandon()
	for number := stream.ExpectedSequence(); number <= c.upto; number++ {
		if _, err := stream.Send(ctx, memstream.Text(c.contentOf(number))); err != nil {
			return err
		}
		if err := c.askAt(number); err != nil {
			return err
		}
	}
	if err := stream.Close(ctx); err != nil {
		return err
	}
	if _, refused := stream.Rejected(); stream.Received() != c.upto || stream.Stored() != c.upto || refused != 0 {
		return fmt.Errorf("received %d, stored %d, rejected %d", stream.Received(), stream.Stored(), refused)
	}
	return nil
}

func (c *clientStep) flush(ctx context.Context) error {
	options := memstream.ObserveOptions{AckLevel: v1.AckLevel_ACK_LEVEL_INDEXED}
	stream, err := c.memory.Observe(ctx, c.producer, options)
	if err != nil {
		return err
	}
	defer stream.Abandon()
	for number := stream.ExpectedSequence(); number <= c.upto; number++ {
		if _, err := stream.Send(ctx, memstream.Text(c.contentOf(number))); err != nil {
			return err
		}
		if err := c.askAt(number); err != nil {
			return err
		}
		if err := stream.Flush(ctx); err != nil {
			return err
		}
	}
	if err := stream.Flush(ctx); err != nil {
		return err
	}
	if stream.Stored() != c.upto || stream.Indexed() != c.upto {
		return fmt.Errorf("stored %d, indexed %d", stream.Stored(), stream.Indexed())
	}
	return stream.Close(ctx)
}

func (c *clientStep) listFragments(ctx context.Context) error {
	var contents, expected []string
	for number := int64(1); number <= c.upto; number++ {
		expected = append(expected, c.contentOf(number))
	}
	for token, more := "", true; more; more = token != "" {
		page, err := c.client.Memories.ListFragments(ctx, &v1.ListFragmentsRequest{
			Namespace: c.memory.Namespace, Memory: c.memory.Name, PageSize: 250, PageToken: token,
		})
		if err != nil {
			return err
		}
		for _, fragment := range page.GetFragments() {
			contents = append(contents, fragment.GetContent())
		}
		token = page.GetNextPageToken()
	}
	if !reflect.DeepEqual(contents, expected) {
		return fmt.Errorf("there are %d fragments: %v", len(contents), contents)
	}
	return nil
}

func (c *clientStep) rejectOne(ctx context.Context) error {
	stream, err := c.memory.Observe(ctx, c.producer, memstream.ObserveOptions{})
	if err != nil {
		return err
	}
	defer stream.Abandon()
	var sent []*memstream.Sent
	for _, content := range []string{"tea", strings.Repeat("x", 100_000), "rain"} {
		one, err := stream.Send(ctx, memstream.Text(content))
		if err != nil {
			return err
		}
		sent = append(sent, one)
	}
	if _, err := sent[1].Stored(ctx); !c.isExpected(err) {
		return fmt.Errorf("it was rejected with %w", err)
	}
	for _, one := range []*memstream.Sent{sent[0], sent[2]} {
		if _, err := one.Stored(ctx); err != nil {
			return err
		}
	}
	if err := stream.Close(ctx); err != nil {
		return err
	}
	if refused, count := stream.Rejected(); count != 1 || refused[0].GetSequence() != 2 || stream.Stored() != 3 {
		return fmt.Errorf("rejected are %v, stored is %d", refused, stream.Stored())
	}
	return nil
}

// checkOutcomes checks that each observation ends exactly once: rejected, or stored with its outcome.
func (c *clientStep) checkOutcomes(ctx context.Context) error {
	stream, err := c.memory.Observe(ctx, c.producer, memstream.ObserveOptions{Outcomes: true})
	if err != nil {
		return err
	}
	defer stream.Abandon()
	every := int64(c.object["refusedEvery"].(float64))
	var sent []*memstream.Sent
	for number := int64(1); number <= c.upto; number++ {
		content := c.contentOf(number)
		if number%every == 0 {
			content = strings.Repeat("x", 100_000)
		}
		one, err := stream.Send(ctx, memstream.Text(content))
		if err != nil {
			return err
		}
		sent = append(sent, one)
		if err := c.askAt(number); err != nil {
			return err
		}
	}
	if err := stream.Flush(ctx); err != nil {
		return err
	}
	ids := map[string]bool{}
	for _, one := range sent {
		_, err := one.Stored(ctx)
		if refused := one.Sequence%every == 0; refused != c.isExpected(err) || !refused && err != nil {
			return fmt.Errorf("observation %d failed with %w", one.Sequence, err)
		}
		if err == nil {
			ids[one.Outcome().GetFragmentId()] = true
		}
	}
	_, refused := stream.Rejected()
	if delete(ids, ""); refused != c.upto/every || int64(len(ids)) != c.upto-refused {
		return fmt.Errorf("%d were rejected, %d have an outcome", refused, len(ids))
	}
	return stream.Close(ctx)
}

func (c *clientStep) isExpected(err error) bool {
	var failure *memstream.Error
	if !errors.As(err, &failure) {
		return false
	}
	actual := object{"code": codeName(failure.Code), "reason": reasonName(failure)}
	return compare(c.object["error"], actual, "error") == nil
}

// queryOne sends a query for one observation and fails if the answer is not that observation.
func (c *clientStep) queryOne(ctx context.Context, stream *memstream.RecallStream, number int64) error {
	query := memstream.TextQuery(fmt.Sprintf("word%d", number))
	limit := int32(1)
	query.Limit = &limit
	answer, err := stream.Query(ctx, query)
	if err != nil {
		return err
	}
	if len(answer.Recollections) != 1 || answer.Recollections[0].GetFragment().GetContent() != c.contentOf(number) {
		return fmt.Errorf("query %d found %v", number, answer.Recollections)
	}
	return nil
}

func (c *clientStep) recall(ctx context.Context) error {
	stream, err := c.memory.Recall(ctx, "")
	if err != nil {
		return err
	}
	defer stream.Abandon()
	var asking sync.WaitGroup
	wrong := make(chan error, 2*c.upto)
	askAll := func() {
		for number := int64(1); number <= c.upto; number++ {
			asking.Add(1)
			go func() {
				defer asking.Done()
				wrong <- c.queryOne(ctx, stream, number)
			}()
		}
	}
	askAll()
	if err := requestFault(c.object["during"].(string)); err != nil {
		return err
	}
	askAll()
	asking.Wait()
	close(wrong)
	for err := range wrong {
		if err != nil {
			return err
		}
	}
	if stream.Connections() < 2 {
		return errors.New("the connection was never cut")
	}
	return stream.Close(ctx)
}

func (c *clientStep) subscribe(ctx context.Context) error {
	producer, err := c.memory.Observe(ctx, c.producer, memstream.ObserveOptions{})
	if err != nil {
		return err
	}
	defer producer.Abandon()
	stream, err := c.memory.Recall(ctx, "")
	if err != nil {
		return err
	}
	defer stream.Abandon()
	query := memstream.TextQuery(fmt.Sprintf("what of %s?", c.producer))
	limit := int32(100)
	query.Limit = &limit
	standing, err := stream.Subscribe(ctx, query)
	if err != nil {
		return err
	}
	defer standing.Close()
	var expected, entered []string
	for number := int64(1); number <= c.upto; number++ {
		expected = append(expected, c.contentOf(number))
		if _, err := producer.Send(ctx, memstream.Text(c.contentOf(number))); err != nil {
			return err
		}
		if err := c.askAt(number); err != nil {
			return err
		}
		for !slices.Contains(entered, c.contentOf(number)) {
			change, err := standing.Next(ctx)
			if err != nil {
				return err
			}
			for _, one := range change.Entered {
				entered = append(entered, one.GetFragment().GetContent())
			}
			if len(change.Changed)+len(change.Retracted) > 0 || len(change.Answer.Recollections) != len(entered) {
				return fmt.Errorf("after %d the change is %v", number, change)
			}
		}
	}
	slices.Sort(entered)
	slices.Sort(expected)
	if !slices.Equal(entered, expected) {
		return fmt.Errorf("entered are %v", entered)
	}
	if stream.Connections() < 2 {
		return errors.New("the connection was never cut")
	}
	standing.Close()
	if err := stream.Close(ctx); err != nil {
		return err
	}
	return producer.Close(ctx)
}

func (c *clientStep) cancelQuery(ctx context.Context) error {
	stream, err := c.memory.Recall(ctx, "")
	if err != nil {
		return err
	}
	defer stream.Abandon()
	given, cancel := context.WithCancel(ctx)
	hanging := make(chan error, 1)
	go func() {
		query := memstream.TextQuery("word1")
		query.MinRevision = 1_000_000
		_, err := stream.Query(given, query)
		hanging <- err
	}()
	for number := int64(1); number < 6; number++ {
		if err := c.queryOne(ctx, stream, number); err != nil {
			cancel()
			return err
		}
	}
	cancel()
	if err := <-hanging; !errors.Is(err, context.Canceled) {
		return fmt.Errorf("the cancelled query failed with %w", err)
	}
	if err := c.queryOne(ctx, stream, 7); err != nil {
		return err
	}
	return stream.Close(ctx)
}

func (c *clientStep) watch(ctx context.Context) error {
	beginning, err := c.memory.Beginning(ctx)
	if err != nil {
		return err
	}
	watch, err := c.memory.Watch(ctx, &v1.WatchRequest{
		Cursor: beginning, Types: []v1.EventType{v1.EventType_EVENT_TYPE_OBSERVED},
	})
	if err != nil {
		return err
	}
	defer watch.Close()
	seen := map[string]bool{}
	for number := int64(1); number <= int64(c.object["observed"].(float64)); number++ {
		next, err := watch.Next()
		if err != nil {
			return err
		}
		if id := next.Event.GetFragmentId(); seen[id] {
			return fmt.Errorf("the event of %s was sent twice", id)
		} else {
			seen[id] = true
		}
		if err := c.askAt(number); err != nil {
			return err
		}
	}
	return nil
}

func (c *clientStep) useMissingMemory(ctx context.Context) error {
	_, described := c.client.Memories.GetMemory(ctx, &v1.GetMemoryRequest{
		Namespace: c.memory.Namespace, Memory: c.memory.Name,
	})
	_, observed := c.memory.Observe(ctx, "p", memstream.ObserveOptions{})
	_, recalled := c.memory.Recall(ctx, "")
	_, watched := c.memory.Watch(ctx, nil)
	for _, err := range []error{described, observed, recalled, watched} {
		if !c.isExpected(err) {
			return fmt.Errorf("it failed with %w", err)
		}
	}
	return nil
}

func (c *clientStep) sendTooLarge(ctx context.Context) error {
	large := strings.Repeat("x", 20_000_000)
	stream, err := c.memory.Observe(ctx, c.producer, memstream.ObserveOptions{})
	if err != nil {
		return err
	}
	defer stream.Abandon()
	if _, err := stream.Send(ctx, memstream.Text(large)); status.Code(err) != codes.InvalidArgument {
		return fmt.Errorf("it was rejected with %w", err)
	}
	if _, err := stream.Send(ctx, memstream.Text("tea")); err != nil {
		return err
	}
	if err := stream.Close(ctx); err != nil || stream.Stored() != 1 {
		return fmt.Errorf("stored is %d: %w", stream.Stored(), err)
	}
	if _, err := c.memory.RecallOnce(ctx, memstream.TextQuery(large)); !c.isExpected(err) {
		return fmt.Errorf("it failed with %w", err)
	}
	return nil
}

func (c *clientStep) exceedDeadline(ctx context.Context) error {
	stream, err := c.memory.Recall(ctx, "")
	if err != nil {
		return err
	}
	defer stream.Abandon()
	query := memstream.TextQuery("word1")
	query.MinRevision = 1_000_000
	for _, ask := range []func(context.Context, *v1.RecallQuery) (*memstream.Answer, error){c.memory.RecallOnce, stream.Query} {
		soon, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
		_, err := ask(soon, query)
		cancel()
		if !c.isExpected(err) || !errors.Is(err, context.DeadlineExceeded) {
			return fmt.Errorf("it failed with %w", err)
		}
	}
	if err := c.queryOne(ctx, stream, 7); err != nil {
		return err
	}
	return stream.Close(ctx)
}

func (c *clientStep) readUnknownValues(ctx context.Context) error {
	answer, err := c.memory.RecallOnce(ctx, memstream.TextQuery("word1"))
	if err != nil {
		return err
	}
	if len(answer.Recollections) != 1 {
		return fmt.Errorf("found %v", answer.Recollections)
	}
	fragment := answer.Recollections[0].GetFragment()
	if fragment.GetContent() != c.contentOf(1) || fragment.GetTier().String() != "99" {
		return fmt.Errorf("found %v", fragment)
	}
	beginning, err := c.memory.Beginning(ctx)
	if err != nil {
		return err
	}
	watch, err := c.memory.Watch(ctx, &v1.WatchRequest{Cursor: beginning})
	if err != nil {
		return err
	}
	defer watch.Close()
	for {
		next, err := watch.Next()
		if err != nil || next.Event.GetType() == 99 {
			return err
		}
	}
}
