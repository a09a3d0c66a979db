// Package callers passes the contexts of the callers of a stream's queries to the stream's interceptors, which see its
// messages alone.
package callers

import (
	"context"
	"sync"
)

type key struct{}

// Callers has the context of each query in flight, by its id.
type Callers struct{ contexts sync.Map }

// With returns ctx with new callers of one stream.
func With(ctx context.Context) (context.Context, *Callers) {
	made := &Callers{}
	return context.WithValue(ctx, key{}, made), made
}

// Set remembers who asks a query.
func (c *Callers) Set(query string, ctx context.Context) { c.contexts.Store(query, ctx) } //nolint:revive // as in a map

// Delete forgets a query.
func (c *Callers) Delete(query string) { c.contexts.Delete(query) }

// Of returns the context of the caller of a query on the stream with this context; ok is false if it is not known.
func Of(ctx context.Context, query string) (caller context.Context, ok bool) {
	if made, isStream := ctx.Value(key{}).(*Callers); isStream {
		if found, isKnown := made.contexts.Load(query); isKnown {
			caller, ok = found.(context.Context)
		}
	}
	return caller, ok
}
