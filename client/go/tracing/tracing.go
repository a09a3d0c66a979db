// Package tracing makes OpenTelemetry spans of a client's calls:
//
//	client, err := memstream.Connect(target, tracing.With(provider))
//
// Each unary call is a span, with its retries; each connection of a stream is a span, the parent of the server's spans.
// What a call or a message of a stream does to a memory is a span by OpenTelemetry's conventions for generative AI (in
// development): search_memory, create_memory and so on, with gen_ai.memory.store.id (NAMESPACE/MEMORY), the number of
// records, and gen_ai.conversation.id (the session or conversation). Of a call it is above the call's span, of a query on a
// stream below the span of its caller and above the server's, of another message of a stream below the stream's. It has
// texts only if OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT is true. No other span has the name of a memory, or an
// id.
package tracing

import (
	"context"
	"errors"
	"strings"
	"sync"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	memstream "memstream.dev/go"
	"memstream.dev/go/internal/callers"
	v1 "memstream.dev/go/memstream/v1"
)

// With returns the option of [memstream.Connect] that makes spans with provider; nil takes the global one.
func With(provider trace.TracerProvider) memstream.Option {
	if provider == nil {
		provider = otel.GetTracerProvider()
	}
	t := tracing{provider.Tracer("memstream")}
	return memstream.WithDialOptions(grpc.WithUnaryInterceptor(t.unary), grpc.WithStreamInterceptor(t.stream))
}

type tracing struct{ tracer trace.Tracer }

// unary runs once around all attempts of a call.
func (t tracing) unary(
	ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker,
	callOptions ...grpc.CallOption,
) error {
	message, isMessage := request.(proto.Message)
	memory := trace.Span(nil)
	if isMessage {
		if operation, attributes := describe(message, place{}); operation != "" {
			ctx, memory = t.start(ctx, operation, attributes)
		}
	}
	ctx, call := t.call(ctx, method)
	err := invoke(ctx, method, request, reply, conn, callOptions...)
	end(call, err)
	if memory != nil {
		if err == nil {
			memory.SetAttributes(describeAnswer(reply)...)
		}
		end(memory, err)
	}
	return err
}

// stream runs once for each connection of a stream.
func (t tracing) stream(
	ctx context.Context, description *grpc.StreamDesc, conn *grpc.ClientConn, method string, open grpc.Streamer,
	callOptions ...grpc.CallOption,
) (grpc.ClientStream, error) {
	ctx, span := t.call(ctx, method)
	opened, err := open(ctx, description, conn, method, callOptions...)
	if err != nil {
		end(span, err)
		return nil, err
	}
	traced := &tracedStream{ClientStream: opened, tracing: t, ctx: ctx, span: span, queries: map[string]trace.Span{}}
	context.AfterFunc(opened.Context(), func() { traced.finish(nil) })
	return traced, nil
}

// call starts the span of a call, whose metadata propagate it (W3C traceparent).
func (t tracing) call(ctx context.Context, method string) (context.Context, trace.Span) {
	name := method[strings.LastIndex(method, "/")+1:]
	ctx, span := t.start(ctx, "memstream.v1/"+name, []attribute.KeyValue{
		attribute.String("rpc.system", "grpc"), attribute.String("rpc.method", name),
	})
	for key, value := range carry(ctx) {
		ctx = metadata.AppendToOutgoingContext(ctx, key, value)
	}
	return ctx, span
}

// carry returns the span of ctx as W3C trace context, by the name of the header.
func carry(ctx context.Context) propagation.MapCarrier {
	carried := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carried)
	return carried
}

func (t tracing) start(
	ctx context.Context, name string, attributes []attribute.KeyValue,
) (context.Context, trace.Span) {
	return t.tracer.Start(ctx, name, trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(attributes...))
}

// end ends a span. Of an error it has the reason or the code, and no text.
func end(span trace.Span, err error) {
	if err != nil {
		kind := "error"
		var own *memstream.Error
		if errors.As(err, &own) {
			kind = own.Code.String()
			if own.Reason != v1.ErrorReason_ERROR_REASON_UNSPECIFIED {
				kind = strings.TrimPrefix(own.Reason.String(), "ERROR_REASON_")
			}
		}
		span.SetAttributes(attribute.String("error.type", kind))
		span.SetStatus(codes.Error, "")
	}
	span.End()
}

// tracedStream makes spans of the messages that do something to a memory.
type tracedStream struct {
	grpc.ClientStream
	tracing tracing
	ctx     context.Context //nolint:containedctx // of the stream, as its messages are
	span    trace.Span

	mutex   sync.Mutex
	place   place
	queries map[string]trace.Span // those in flight, by query_id
}

func (s *tracedStream) SendMsg(message any) error {
	switch sent := message.(type) {
	case *v1.ObserveRequest:
		return s.observe(sent)
	case *v1.RecallRequest:
		s.ask(sent)
	}
	return s.ClientStream.SendMsg(message)
}

func (s *tracedStream) observe(sent *v1.ObserveRequest) error {
	if opened := sent.GetOpen(); opened != nil {
		s.open(place{opened.GetNamespace(), opened.GetMemory(), opened.GetSession()})
	}
	operation, attributes := "", []attribute.KeyValue(nil)
	if batch := sent.GetBatch(); batch != nil {
		operation, attributes = describe(batch, s.opened())
	}
	if operation == "" {
		return s.ClientStream.SendMsg(sent)
	}
	_, span := s.tracing.start(s.ctx, operation, attributes)
	err := s.ClientStream.SendMsg(sent)
	end(span, err)
	return err
}

func (s *tracedStream) ask(sent *v1.RecallRequest) {
	if opened := sent.GetOpen(); opened != nil {
		s.open(place{opened.GetNamespace(), opened.GetMemory(), opened.GetSession()})
	}
	var asked interface {
		proto.Message
		GetQueryId() string
	}
	switch {
	case sent.GetQuery() != nil:
		asked = sent.GetQuery()
	case sent.GetContext() != nil:
		asked = sent.GetContext()
	default:
		return
	}
	operation, attributes := describe(asked, s.opened())
	parent, isKnown := callers.Of(s.ctx, asked.GetQueryId())
	if !isKnown {
		parent = s.ctx
	}
	ctx, span := s.tracing.start(parent, operation, attributes)
	sent.Traceparent = carry(ctx)["traceparent"]
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.queries[asked.GetQueryId()] = span
}

func (s *tracedStream) RecvMsg(message any) error {
	err := s.ClientStream.RecvMsg(message)
	if err != nil {
		s.finish(err)
		return err
	}
	if received, isRecall := message.(*v1.RecallResponse); isRecall {
		s.answer(received)
	}
	return nil
}

// answer ends the span of a query at its first answer: a standing query has more of them.
func (s *tracedStream) answer(received *v1.RecallResponse) {
	switch {
	case received.GetRecollections() != nil:
		part := received.GetRecollections()
		if span := s.query(part.GetQueryId(), false); span != nil {
			span.SetAttributes(describeAnswer(part)...)
		}
		if part.GetDone() != nil {
			s.end(part.GetQueryId(), nil)
		}
	case received.GetContext() != nil:
		if span := s.query(received.GetContext().GetQueryId(), false); span != nil {
			span.SetAttributes(describeAnswer(received.GetContext().GetResponse())...)
		}
		s.end(received.GetContext().GetQueryId(), nil)
	case received.GetDone() != nil:
		s.end(received.GetDone().GetQueryId(), nil)
	case received.GetFailed() != nil:
		s.end(received.GetFailed().GetQueryId(), errors.New("failed"))
	}
}

func (s *tracedStream) end(query string, err error) {
	if span := s.query(query, true); span != nil {
		end(span, err)
	}
}

func (s *tracedStream) query(id string, remove bool) trace.Span {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	found := s.queries[id]
	if remove {
		delete(s.queries, id)
	}
	return found
}

// finish ends the spans of the stream and of the queries in flight.
func (s *tracedStream) finish(err error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	for id, span := range s.queries {
		end(span, err)
		delete(s.queries, id)
	}
	s.span.End() // ending it again does nothing
}

func (s *tracedStream) open(where place) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.place = where
}

func (s *tracedStream) opened() place {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return s.place
}
