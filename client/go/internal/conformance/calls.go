package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"

	memstream "memstream.dev/go"
	v1 "memstream.dev/go/memstream/v1"
)

// checkDetails checks the invalid fields in the gRPC status details of an error.
func (c *clientStep) checkDetails(ctx context.Context) error {
	_, failed := c.memory.RecallOnce(ctx, memstream.TextQuery(""))
	var fields, reasons []string
	for _, detail := range status.Convert(failed).Details() {
		switch detail := detail.(type) {
		case *errdetails.BadRequest:
			for _, violation := range detail.GetFieldViolations() {
				fields = append(fields, violation.GetField())
			}
		case *errdetails.ErrorInfo:
			reasons = append(reasons, detail.GetReason())
		}
	}
	if !slices.Equal(fields, []string{c.object["field"].(string)}) || !slices.Equal(reasons, []string{"INVALID_FIELD"}) {
		return fmt.Errorf("it failed with %w, with the details %v and %v", failed, fields, reasons)
	}
	return nil
}

// attempts returns a unary call and an opening of each stream.
func (c *clientStep) attempts() map[string]func(context.Context) error {
	return map[string]func(context.Context) error{
		"a call": func(ctx context.Context) error {
			_, err := c.client.Memories.GetMemory(ctx, &v1.GetMemoryRequest{
				Namespace: c.memory.Namespace, Memory: c.memory.Name,
			})
			return err
		},
		"a recall": func(ctx context.Context) error {
			_, err := c.memory.RecallOnce(ctx, memstream.TextQuery("word1"))
			return err
		},
		"observe": func(ctx context.Context) error {
			stream, err := c.memory.Observe(ctx, "another", memstream.ObserveOptions{})
			if err != nil {
				return err
			}
			return stream.Close(ctx)
		},
		"recall": func(ctx context.Context) error {
			stream, err := c.memory.Recall(ctx, "")
			if err != nil {
				return err
			}
			if _, err := stream.Query(ctx, memstream.TextQuery("word1")); err != nil {
				return err
			}
			return stream.Close(ctx)
		},
		"watch": func(ctx context.Context) error {
			beginning, err := c.memory.Beginning(ctx)
			if err != nil {
				return err
			}
			watch, err := c.memory.Watch(ctx, &v1.WatchRequest{Cursor: beginning})
			if err != nil {
				return err
			}
			defer watch.Close()
			_, err = watch.Next()
			return err
		},
	}
}

// runTogether runs attempts concurrently and joins the errors of check, which gets the error of each attempt.
func runTogether(attempts map[string]func(context.Context) error, ctx context.Context, check func(error) error) error {
	var running sync.WaitGroup
	var mutex sync.Mutex
	var wrong error
	for name, attempt := range attempts {
		running.Add(1)
		go func() {
			defer running.Done()
			err := check(attempt(ctx))
			mutex.Lock()
			defer mutex.Unlock()
			if err != nil {
				wrong = errors.Join(wrong, fmt.Errorf("%s: %w", name, err))
			}
		}()
	}
	running.Wait()
	return wrong
}

// callWhileAway starts each attempt while the server is unreachable; it succeeds.
func (c *clientStep) callWhileAway(ctx context.Context) error {
	if err := requestFault("away"); err != nil {
		return err
	}
	attempts := c.attempts()
	attempts["a batch"] = func(ctx context.Context) error {
		_, err := c.memory.ObserveBatch(ctx, "", memstream.Text(c.contentOf(c.upto)))
		return err
	}
	return runTogether(attempts, ctx, func(err error) error { return err })
}

// cancelWhileDown starts each attempt while the server is unreachable, and cancels it.
func (c *clientStep) cancelWhileDown(ctx context.Context) error {
	if err := requestFault("down"); err != nil {
		return err
	}
	brief, cancel := context.WithCancel(ctx)
	time.AfterFunc(200*time.Millisecond, cancel)
	wrong := runTogether(c.attempts(), brief, func(err error) error {
		if !errors.Is(err, context.Canceled) {
			return fmt.Errorf("it failed with %w", err)
		}
		return nil
	})
	return errors.Join(wrong, requestFault("up"))
}

// renewToken uses calls and streams with a token source that returns another token after the first one is revoked.
func (c *clientStep) renewToken(ctx context.Context) error {
	tokens := c.object["tokens"].([]any)
	var mutex sync.Mutex
	current := tokens[0].(string)
	source := memstream.WithTokenSource(func(context.Context) (string, error) {
		mutex.Lock()
		defer mutex.Unlock()
		return current, nil
	})
	client, err := memstream.Connect(c.address, memstream.WithRetry(retry), source)
	if err != nil {
		return err
	}
	defer client.Close() //nolint:errcheck // no call is open any more
	memory, err := client.EnsureMemory(ctx, c.memory.String())
	if err != nil {
		return err
	}
	revoke := func() error {
		mutex.Lock()
		current = tokens[1].(string)
		mutex.Unlock()
		return requestFault("revoke")
	}
	if err := c.useUntilReopened(ctx, memory, revoke); err != nil {
		return err
	}
	former, err := memstream.Connect(c.address, memstream.WithRetry(retry), memstream.WithToken(tokens[0].(string)))
	if err != nil {
		return err
	}
	defer former.Close() //nolint:errcheck // no call is open any more
	memory, err = former.Memory(c.memory.String())
	if err != nil {
		return err
	}
	if _, err = memory.Observe(ctx, "p", memstream.ObserveOptions{}); !c.isExpected(err) {
		return fmt.Errorf("a call with the revoked token failed with %w", err)
	}
	return nil
}

// useUntilReopened uses a stream of each kind before and after the token is revoked, until each was opened again.
func (c *clientStep) useUntilReopened(ctx context.Context, memory *memstream.Memory, revoke func() error) error {
	stream, err := memory.Observe(ctx, c.producer, memstream.ObserveOptions{})
	if err != nil {
		return err
	}
	defer stream.Abandon()
	queries, err := memory.Recall(ctx, "")
	if err != nil {
		return err
	}
	defer queries.Abandon()
	beginning, err := memory.Beginning(ctx)
	if err != nil {
		return err
	}
	watch, err := memory.Watch(ctx, &v1.WatchRequest{Cursor: beginning})
	if err != nil {
		return err
	}
	defer watch.Close()
	use := func() error {
		sent, err := stream.Send(ctx, memstream.Text(c.contentOf(stream.ExpectedSequence())))
		if err != nil {
			return err
		}
		if _, err = sent.Stored(ctx); err != nil {
			return err
		}
		if _, err = queries.Query(ctx, memstream.TextQuery("word1")); err != nil {
			return err
		}
		_, err = watch.Next()
		return err
	}
	if err := use(); err != nil {
		return err
	}
	if err := revoke(); err != nil {
		return err
	}
	for min(stream.Connections(), queries.Connections(), watch.Connections) < 2 {
		if err := use(); err != nil {
			return err
		}
	}
	return stream.Close(ctx)
}
