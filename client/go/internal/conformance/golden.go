package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

type entry struct {
	Type  string
	Name  string
	Bytes []byte
	JSON  any
}

func runGolden(text []byte) error {
	var content struct {
		Contract string
		Messages []entry
	}
	if err := json.Unmarshal(text, &content); err != nil {
		return err
	}
	for _, one := range content.Messages {
		report(fmt.Sprintf("%s: %s: %s", content.Contract, one.Type, one.Name), checkEntry(one, content.Contract == "future"))
	}
	return nil
}

func checkEntry(one entry, future bool) error {
	message, err := newMessage(protoreflect.FullName(one.Type))
	if err != nil {
		return err
	}
	if err := proto.Unmarshal(one.Bytes, message); err != nil {
		return err
	}
	read, err := asJSON(message)
	if err != nil {
		return err
	}
	if !reflect.DeepEqual(read, one.JSON) {
		return fmt.Errorf("it decodes to %v", read)
	}
	if again, err := proto.Marshal(message); err != nil || !sameBytes(again, one.Bytes) {
		return errors.Join(errors.New("decoding and encoding changes its bytes"), err)
	}
	if future {
		return nil
	}
	written, err := fromJSON(protoreflect.FullName(one.Type), one.JSON)
	if err != nil {
		return err
	}
	if again, err := proto.Marshal(written); err != nil || !sameBytes(again, one.Bytes) {
		return errors.Join(errors.New("it encodes to other bytes"), err)
	}
	return nil
}

// sameBytes reports whether two messages have the same bytes except for the order of fields, which each language chooses.
func sameBytes(one, other []byte) bool {
	one, other = slices.Clone(one), slices.Clone(other)
	slices.Sort(one)
	slices.Sort(other)
	return bytes.Equal(one, other)
}

func newMessage(name protoreflect.FullName) (proto.Message, error) {
	kind, err := protoregistry.GlobalTypes.FindMessageByName(name)
	if err != nil {
		return nil, err
	}
	return kind.New().Interface(), nil
}

func asJSON(message proto.Message) (any, error) {
	text, err := protojson.Marshal(message)
	if err != nil {
		return nil, err
	}
	var value any
	err = json.Unmarshal(text, &value)
	return value, err
}

func fromJSON(name protoreflect.FullName, value any) (proto.Message, error) {
	message, err := newMessage(name)
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(value)
	if err != nil {
		return nil, err
	}
	return message, protojson.Unmarshal(text, message)
}
