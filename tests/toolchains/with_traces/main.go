// Uses a memory with spans: `main SERVER COLLECTOR`.
package main

import (
	"context"
	"os"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	memstream "memstream.dev/go"
	v1 "memstream.dev/go/memstream/v1"
	"memstream.dev/go/tracing"
)

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func main() {
	ctx := context.Background()
	exporter, err := otlptracegrpc.New(ctx, otlptracegrpc.WithEndpoint(os.Args[2]), otlptracegrpc.WithInsecure())
	check(err)
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithBatcher(exporter), sdktrace.WithResource(resource.NewSchemaless(attribute.String("service.name", "agent"))),
	)
	client, err := memstream.Connect(os.Args[1], tracing.With(provider))
	check(err)
	agent, span := provider.Tracer("an agent").Start(ctx, "invoke_agent joy")
	use(agent, client, provider.Tracer("an agent"))
	span.End()
	check(client.Close())
	check(provider.Shutdown(ctx))
}

func queryOf(limit int32) *v1.RecallQuery {
	query := memstream.TextQuery("private words")
	query.Limit = &limit
	return query
}

func use(ctx context.Context, client *memstream.Client, tracer trace.Tracer) {
	memory, err := client.CreateMemory(ctx, "private-namespace/private-memory", memstream.CreateOptions{})
	check(err)
	_, err = memory.ObserveBatch(ctx, "monday", memstream.Text("private words"))
	check(err)
	home := memstream.Text("private home")
	home.ExternalId = "home"
	put, err := client.Memories.PutFragment(ctx, &v1.PutFragmentRequest{
		Namespace: memory.Namespace, Memory: memory.Name, Observation: home,
	})
	check(err)
	observing, err := memory.Observe(ctx, "private-producer", memstream.ObserveOptions{Session: "tuesday"})
	check(err)
	_, err = observing.Send(ctx, memstream.Text("more private words"))
	check(err)
	check(observing.Close(ctx))
	_, err = memory.RecallOnce(ctx, queryOf(2))
	check(err)
	recalls, err := memory.Recall(ctx, "tuesday")
	check(err)
	asking, span := tracer.Start(ctx, "asking")
	_, err = recalls.Query(asking, queryOf(1))
	check(err)
	span.End()
	check(recalls.Close(ctx))
	_, err = client.Memories.ForgetFragments(ctx, &v1.ForgetFragmentsRequest{
		Namespace: memory.Namespace, Memory: memory.Name, Ids: []string{put.GetFragment().GetId()},
	})
	check(err)
	other, err := client.Memory("private-namespace/other")
	check(err)
	if _, err = other.RecallOnce(ctx, memstream.TextQuery("private words")); err == nil {
		panic("a memory that does not exist answers")
	}
}
