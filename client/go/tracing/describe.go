package tracing

import (
	"encoding/json"
	"os"
	"slices"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	"google.golang.org/protobuf/proto"

	v1 "memstream.dev/go/memstream/v1"
)

// operations are those of the conventions, by the message that asks for one, without "Request".
var operations = map[string]string{
	"ClearMemory":            "delete_memory",
	"CloneMemory":            "create_memory_store",
	"Context":                "search_memory",
	"ContextQuery":           "search_memory",
	"CreateMemory":           "create_memory_store",
	"DeleteBlock":            "delete_memory",
	"DeleteMemory":           "delete_memory_store",
	"EditBlock":              "update_memory",
	"EraseFragments":         "delete_memory",
	"ForgetFragments":        "delete_memory",
	"ObservationBatch":       "create_memory",
	"ObserveBatch":           "create_memory",
	"PutBlock":               "upsert_memory",
	"PutFragment":            "upsert_memory",
	"RecallOnce":             "search_memory",
	"RecallQuery":            "search_memory",
	"RestoreFragmentVersion": "update_memory",
	"RestoreFragments":       "update_memory",
	"SupersedeFragments":     "update_memory",
	"UpdateFragment":         "update_memory",
}

const content = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"

// place is the memory and the session of a stream.
type place struct{ namespace, memory, session string }

// capturesContent reports whether spans may have texts: by default they have none.
func capturesContent() bool {
	return slices.Contains([]string{"true", "1", "span_only", "span_and_event"}, strings.ToLower(os.Getenv(content)))
}

// describe returns the operation of a message and its attributes; an empty operation if it does nothing to a memory.
func describe(message proto.Message, stream place) (string, []attribute.KeyValue) {
	operation := operations[strings.TrimSuffix(string(message.ProtoReflect().Descriptor().Name()), "Request")]
	if operation == "" {
		return "", nil
	}
	written := listWritten(message)
	if operation == "create_memory" &&
		slices.ContainsFunc(written, func(one *v1.Observation) bool { return one.GetExternalId() != "" }) {
		operation = "upsert_memory" // an existing external_id is replaced
	}
	if context, ok := message.(*v1.ContextQuery); ok {
		message = context.GetRequest()
	}
	ids := listIDs(message)
	count := len(written)
	if count == 0 {
		count = len(ids)
	}
	found := []attribute.KeyValue{
		attribute.String("gen_ai.operation.name", operation),
		attribute.String("gen_ai.provider.name", "memstream"),
	}
	texts := map[attribute.Key]string{
		"gen_ai.memory.store.id": storeOf(message, stream),
		"gen_ai.conversation.id": first(text(message, "conversation"), text(message, "session"), stream.session),
	}
	if len(ids) == 1 {
		texts["gen_ai.memory.record.id"] = ids[0]
	}
	if capturesContent() {
		texts["gen_ai.memory.query.text"] = first(queryOf(message).GetText(), text(message, "question"))
		texts["gen_ai.memory.records"] = encodeWritten(written)
	}
	for key, value := range texts {
		if value != "" {
			found = append(found, key.String(value))
		}
	}
	if count > 0 {
		found = append(found, attribute.Int("gen_ai.memory.record.count", count))
	}
	return operation, found
}

// describeAnswer returns the number of records of a search, and their texts if they are captured.
func describeAnswer(answer any) []attribute.KeyValue {
	count := attribute.Key("gen_ai.memory.record.count")
	switch found := answer.(type) {
	case *v1.ContextResponse:
		number := 0
		for _, part := range found.GetParts() {
			number += len(part.GetFragmentIds())
		}
		return []attribute.KeyValue{count.Int(number)}
	case *v1.RecallOnceResponse:
		return describeAnswer(found.GetRecollections())
	case *v1.Recollections:
		hits := found.GetRecollections()
		made := []attribute.KeyValue{count.Int(len(hits))}
		if len(hits) > 0 && capturesContent() {
			records := make([]record, 0, len(hits))
			for _, one := range hits {
				records = append(records, record{one.GetFragment().GetContent(), one.GetFragment().GetId(), one.GetScore()})
			}
			made = append(made, attribute.String("gen_ai.memory.records", encode(records)))
		}
		return made
	}
	return nil
}

// record is one of the conventions' schema of memory records.
type record struct {
	Content string  `json:"content"`
	ID      string  `json:"id,omitempty"`
	Score   float64 `json:"score,omitempty"`
}

func encodeWritten(written []*v1.Observation) string {
	records := make([]record, 0, len(written))
	for _, one := range written {
		records = append(records, record{Content: one.GetContent(), ID: one.GetExternalId()})
	}
	return encode(records)
}

func encode(records []record) string {
	if len(records) == 0 {
		return ""
	}
	encoded, err := json.Marshal(records)
	if err != nil { // not for these types
		return ""
	}
	return string(encoded)
}

// listWritten returns the observations of a message.
func listWritten(message proto.Message) []*v1.Observation {
	switch found := message.(type) {
	case interface{ GetObservations() []*v1.Observation }:
		return found.GetObservations()
	case interface{ GetObservation() *v1.Observation }:
		if found.GetObservation() != nil {
			return []*v1.Observation{found.GetObservation()}
		}
	}
	return nil
}

func listIDs(message proto.Message) []string {
	var ids []string
	if named, ok := message.(interface{ GetIds() []string }); ok {
		ids = append(ids, named.GetIds()...)
	}
	if named, ok := message.(interface{ GetExternalIds() []string }); ok {
		ids = append(ids, named.GetExternalIds()...)
	}
	if len(ids) == 0 {
		ids = append(ids, text(message, "id"), text(message, "block"))
	}
	if changed, ok := message.(interface{ GetFragment() *v1.Fragment }); ok && changed.GetFragment() != nil {
		ids = append(ids, changed.GetFragment().GetId())
	}
	return slices.DeleteFunc(ids, func(id string) bool { return id == "" })
}

// storeOf returns NAMESPACE/MEMORY; empty if the message asks several memories.
func storeOf(message proto.Message, stream place) string {
	if scopes := queryOf(message).GetScopes(); len(scopes) > 0 {
		if len(scopes) == 1 {
			return scopes[0].GetMemory()
		}
		return ""
	}
	namespace, memory := first(text(message, "namespace"), stream.namespace), first(text(message, "memory"), stream.memory)
	if namespace == "" || memory == "" {
		return ""
	}
	return namespace + "/" + memory
}

func queryOf(message proto.Message) *v1.RecallQuery {
	switch found := message.(type) {
	case *v1.RecallQuery:
		return found
	case interface{ GetQuery() *v1.RecallQuery }:
		return found.GetQuery()
	}
	return nil
}

// text returns the value of a text field; empty if the message has none of that name.
func text(message proto.Message, name string) string {
	reflected := message.ProtoReflect()
	for index := range reflected.Descriptor().Fields().Len() {
		field := reflected.Descriptor().Fields().Get(index)
		if string(field.Name()) == name && field.Kind() == 9 && !field.IsList() { // 9: a string
			return reflected.Get(field).String()
		}
	}
	return ""
}

func first(values ...string) string {
	for _, value := range values {
		if value != "" {
			return value
		}
	}
	return ""
}
