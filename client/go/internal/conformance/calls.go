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

// details finds the fields that are wrong in the status of an error, as gRPC has it.
func (c *clientStep) details(ctx context.Context) error {
	_, failed := c.memory.RecallOnce(ctx, memstream.Asking(""))
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
		return fmt.Errorf("it failed with %w, of the details %v and %v", failed, fields, reasons)
	}
	return nil
}

// attempts are a call and an opening of each kind.
func (c *clientStep) attempts() map[string]func(context.Context) error {
	return map[string]func(context.Context) error{
		"a call": func(ctx context.Context) error {
			_, err := c.client.Memories.GetMemory(ctx, &v1.GetMemoryRequest{
				Namespace: c.memory.Namespace, Memory: c.memory.Name,
			})
			return err
		},
		"a recall": func(ctx context.Context) error {
			_, err := c.memory.RecallOnce(ctx, memstream.Asking("word1"))
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
			if _, err := stream.Query(ctx, memstream.Asking("word1")); err != nil {
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

// together runs attempts and joins what check says of how each has ended.
func together(attempts map[string]func(context.Context) error, ctx context.Context, check func(error) error) error {
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

// away begins each while the server cannot be reached, and each succeeds.
func (c *clientStep) away(ctx context.Context) error {
	if err := ask("away"); err != nil {
		return err
	}
	attempts := c.attempts()
	attempts["a batch"] = func(ctx context.Context) error {
		_, err := c.memory.ObserveBatch(ctx, "", memstream.Text(c.said(c.upto)))
		return err
	}
	return together(attempts, ctx, func(err error) error { return err })
}

// abort begins each while the server cannot be reached, and cancels it.
func (c *clientStep) abort(ctx context.Context) error {
	if err := ask("down"); err != nil {
		return err
	}
	brief, cancel := context.WithCancel(ctx)
	time.AfterFunc(200*time.Millisecond, cancel)
	wrong := together(c.attempts(), brief, func(err error) error {
		if !errors.Is(err, context.Canceled) {
			return fmt.Errorf("it ended with %w", err)
		}
		return nil
	})
	return errors.Join(wrong, ask("up"))
}

// renew keeps calls and streams going whose token source gives another token when the first one is revoked.
func (c *clientStep) renew(ctx context.Context) error {
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
	defer client.Close() //nolint:errcheck // nothing is on it any more
	memory, err := client.EnsureMemory(ctx, c.memory.String())
	if err != nil {
		return err
	}
	revoke := func() error {
		mutex.Lock()
		current = tokens[1].(string)
		mutex.Unlock()
		return ask("revoke")
	}
	if err := c.goOn(ctx, memory, revoke); err != nil {
		return err
	}
	former, err := memstream.Connect(c.address, memstream.WithRetry(retry), memstream.WithToken(tokens[0].(string)))
	if err != nil {
		return err
	}
	defer former.Close() //nolint:errcheck // nothing is on it any more
	memory, err = former.Memory(c.memory.String())
	if err != nil {
		return err
	}
	if _, err = memory.Observe(ctx, "p", memstream.ObserveOptions{}); !c.expected(err) {
		return fmt.Errorf("the revoked token met with %w", err)
	}
	return nil
}

// goOn uses a stream of each kind before and after the token is revoked, until each was opened again.
func (c *clientStep) goOn(ctx context.Context, memory *memstream.Memory, revoke func() error) error {
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
		sent, err := stream.Send(ctx, memstream.Text(c.said(stream.ExpectedSequence())))
		if err != nil {
			return err
		}
		if _, err = sent.Stored(ctx); err != nil {
			return err
		}
		if _, err = queries.Query(ctx, memstream.Asking("word1")); err != nil {
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
