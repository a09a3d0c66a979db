package memstream

import (
	"context"
	"strings"

	v1 "memstream.dev/go/memstream/v1"
)

// Memory is one memory of a server, created by [Client.Memory].
type Memory struct {
	// Namespace and Name identify it.
	Namespace, Name string

	client *Client
}

// Text returns an observation with text content.
func Text(content string) *v1.Observation {
	return &v1.Observation{Body: &v1.Observation_Content{Content: content}}
}

// TextQuery returns a query for text.
func TextQuery(text string) *v1.RecallQuery {
	return &v1.RecallQuery{Observation: &v1.RecallQuery_Text{Text: text}}
}

// String returns "namespace/name".
func (m *Memory) String() string { return m.Namespace + "/" + m.Name }

// ObserveBatch sends observations without a producer and returns when all are stored. The acknowledgement lists the
// rejected ones.
func (m *Memory) ObserveBatch(ctx context.Context, session string, observations ...*v1.Observation) (*v1.Ack, error) {
	answer, err := m.client.Streams.ObserveBatch(ctx, &v1.ObserveBatchRequest{
		Namespace: m.Namespace, Memory: m.Name, Session: session, Observations: observations,
	})
	return answer.GetAck(), err
}

// RecallOnce sends one query over several memories, which its Scopes name, without a stream.
func (c *Client) RecallOnce(ctx context.Context, query *v1.RecallQuery) (*Answer, error) {
	if len(query.GetScopes()) == 0 {
		return nil, invalidField("query.scopes", "is empty: name memories, or ask a Memory")
	}
	answer, err := c.Streams.RecallOnce(ctx, &v1.RecallOnceRequest{Query: query})
	if err != nil {
		return nil, err
	}
	return newAnswer([]*v1.Recollections{answer.GetRecollections()}, answer.GetDone()), nil
}

// TurnContext is what an agent sends to its model before a turn.
type TurnContext struct{ *v1.ContextResponse }

// Text returns all parts, for a model that takes one text.
func (t *TurnContext) Text() string {
	var text strings.Builder
	for _, part := range t.GetParts() {
		text.WriteString(part.GetText())
	}
	return text.String()
}

// Context builds what an agent sends to its model before a turn: blocks, the end of the conversation, memories and the
// question, within request.Budget tokens. Set request.After to the Position of the turn before: the text then begins with
// that of the turn before, so that the model's prompt cache reads it, or BrokenBy says why not.
func (c *Client) Context(ctx context.Context, request *v1.ContextRequest) (*TurnContext, error) {
	answer, err := c.Contexts.Context(ctx, request)
	if err != nil {
		return nil, err
	}
	return &TurnContext{answer}, nil
}

// RecallOnce sends one query, without a stream.
func (m *Memory) RecallOnce(ctx context.Context, query *v1.RecallQuery) (*Answer, error) {
	answer, err := m.client.Streams.RecallOnce(ctx, &v1.RecallOnceRequest{
		Namespace: m.Namespace, Memory: m.Name, Query: query,
	})
	if err != nil {
		return nil, err
	}
	return newAnswer([]*v1.Recollections{answer.GetRecollections()}, answer.GetDone()), nil
}
