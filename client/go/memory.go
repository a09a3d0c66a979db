package memstream

import (
	"context"

	v1 "memstream.dev/go/memstream/v1"
)

// Memory is one memory of a server; made by [Client.Memory].
type Memory struct {
	// Namespace and Name say which.
	Namespace, Name string

	client *Client
}

// Text makes an observation of what was perceived.
func Text(content string) *v1.Observation {
	return &v1.Observation{Body: &v1.Observation_Content{Content: content}}
}

// Asking makes a query of text.
func Asking(text string) *v1.RecallQuery {
	return &v1.RecallQuery{Observation: &v1.RecallQuery_Text{Text: text}}
}

// String is "namespace/name".
func (m *Memory) String() string { return m.Namespace + "/" + m.Name }

// ObserveBatch observes without a producer and returns when all are stored. Refused observations are in the
// acknowledgement.
func (m *Memory) ObserveBatch(ctx context.Context, session string, observations ...*v1.Observation) (*v1.Ack, error) {
	answer, err := m.client.Streams.ObserveBatch(ctx, &v1.ObserveBatchRequest{
		Namespace: m.Namespace, Memory: m.Name, Session: session, Observations: observations,
	})
	return answer.GetAck(), err
}

// RecallOnce asks one query, without a stream.
func (m *Memory) RecallOnce(ctx context.Context, query *v1.RecallQuery) (*Answer, error) {
	answer, err := m.client.Streams.RecallOnce(ctx, &v1.RecallOnceRequest{
		Namespace: m.Namespace, Memory: m.Name, Query: query,
	})
	if err != nil {
		return nil, err
	}
	return newAnswer([]*v1.Recollections{answer.GetRecollections()}, answer.GetDone()), nil
}
