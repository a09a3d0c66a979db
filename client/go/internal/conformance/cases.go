package main

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	memstream "memstream.dev/go"
)

const readTime = 30 * time.Second

type object = map[string]any

// stream is an open streaming call.
type stream struct {
	call   grpc.ClientStream
	method protoreflect.MethodDescriptor
	cancel context.CancelFunc
}

type run struct {
	address string
	conn    *grpc.ClientConn
	kept    map[string]string
	streams map[string]*stream
}

func runCases(address string, text []byte) error {
	var content struct {
		Cases []struct {
			Name  string
			Steps []object
		}
	}
	if err := json.Unmarshal(text, &content); err != nil {
		return err
	}
	for _, one := range content.Cases {
		this := &run{address, nil, map[string]string{"ns": "c-" + strings.ToLower(rand.Text()[:12])}, map[string]*stream{}}
		report(one.Name, this.runSteps(one.Steps))
	}
	return nil
}

// connect opens a connection. Each stream has its own, so that a broken one affects no other.
func (r *run) connect() (*grpc.ClientConn, error) {
	return grpc.NewClient(r.address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
}

func (r *run) runSteps(steps []object) (err error) {
	if r.conn, err = r.connect(); err != nil {
		return err
	}
	defer func() {
		for _, one := range r.streams {
			one.cancel()
		}
	}()
	for number, step := range steps {
		if err := r.runStep(fillPlaceholders(step, r.kept).(object)); err != nil {
			return fmt.Errorf("step %d: %w", number+1, err)
		}
	}
	return nil
}

func (r *run) runStep(step object) error {
	text := func(key string) string {
		value, _ := step[key].(string)
		return value
	}
	switch {
	case step["call"] != nil:
		return r.call(step)
	case step["open"] != nil:
		opened, err := r.open(step)
		r.streams[text("open")] = opened
		return err
	case step["send"] != nil:
		return r.streams[text("send")].send(step)
	case step["receive"] != nil:
		return r.streams[text("receive")].receive(step["message"])
	case step["finish"] != nil:
		return r.streams[text("finish")].finish(step["error"])
	case step["cancel"] != nil:
		r.streams[text("cancel")].cancel()
		return nil
	case step["ask"] != nil:
		if err := requestFault(text("ask")); err != nil {
			return err
		}
		made, err := r.connect()
		r.conn = made
		return err
	}
	return runClientStep(r.address, step)
}

func methodOf(name string) (protoreflect.MethodDescriptor, string, error) {
	service, method, _ := strings.Cut(name, "/")
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName("memstream.v1." + service))
	if err != nil {
		return nil, "", err
	}
	one := found.(protoreflect.ServiceDescriptor).Methods().ByName(protoreflect.Name(method))
	return one, "/memstream.v1." + name, nil
}

// newRequest returns a method's request; "unknown" has base64 bytes of fields that a later contract may add.
func newRequest(method protoreflect.MethodDescriptor, content any, step object) (proto.Message, error) {
	message, err := fromJSON(method.Input().FullName(), content)
	if err != nil {
		return nil, err
	}
	text, _ := step["unknown"].(string)
	unknown, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil, err
	}
	return message, proto.UnmarshalOptions{Merge: true}.Unmarshal(unknown, message)
}

func outgoingContext(step object) context.Context {
	ctx := context.Background()
	given, _ := step["metadata"].(object)
	for key, value := range given {
		ctx = metadata.AppendToOutgoingContext(ctx, key, value.(string))
	}
	return ctx
}

func (r *run) call(step object) error {
	method, path, err := methodOf(step["call"].(string))
	if err != nil {
		return err
	}
	request, err := newRequest(method, step["request"], step)
	if err != nil {
		return err
	}
	answer, err := newMessage(method.Output().FullName())
	if err != nil {
		return err
	}
	limit := readTime
	if given, ok := step["timeoutS"].(float64); ok {
		limit = time.Duration(given * float64(time.Second))
	}
	ctx, cancel := context.WithTimeout(outgoingContext(step), limit)
	defer cancel()
	if err := r.conn.Invoke(ctx, path, request, answer); err != nil || step["error"] != nil {
		return checkError(step["error"], err)
	}
	actual, err := asJSON(answer)
	if err != nil {
		return err
	}
	if err := compare(step["answer"], actual, "answer"); err != nil {
		return err
	}
	keep, _ := step["keep"].(object)
	for key, path := range keep {
		r.kept[key] = valueAt(actual, path.(string))
	}
	return nil
}

func (r *run) open(step object) (*stream, error) {
	method, path, err := methodOf(step["stream"].(string))
	if err != nil {
		return nil, err
	}
	conn, err := r.connect()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(outgoingContext(step))
	description := &grpc.StreamDesc{ClientStreams: method.IsStreamingClient(), ServerStreams: true}
	call, err := conn.NewStream(ctx, description, path)
	if err != nil {
		cancel()
		return nil, err
	}
	return &stream{call, method, cancel}, nil
}

func (s *stream) send(step object) error {
	request, err := newRequest(s.method, step["message"], step)
	if err != nil {
		return err
	}
	if err := s.call.SendMsg(request); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if s.method.IsStreamingClient() {
		return nil
	}
	return s.call.CloseSend()
}

func (s *stream) next() (object, error) {
	answer, err := newMessage(s.method.Output().FullName())
	if err != nil {
		return nil, err
	}
	late := time.AfterFunc(readTime, s.cancel)
	defer late.Stop()
	if err := s.call.RecvMsg(answer); err != nil {
		return nil, err
	}
	actual, err := asJSON(answer)
	if err != nil {
		return nil, err
	}
	return actual.(object), nil
}

// receive reads messages until one is as expected.
func (s *stream) receive(expected any) error {
	var seen []object
	for {
		actual, err := s.next()
		if err != nil {
			return fmt.Errorf("the stream ended: %w; received before: %v", err, seen)
		}
		seen = append(seen, actual)
		if compare(expected, actual, "message") == nil {
			return nil
		}
	}
}

func (s *stream) finish(expected any) error {
	if expected == nil {
		if err := s.call.CloseSend(); err != nil {
			return err
		}
	}
	for {
		if _, err := s.next(); errors.Is(err, io.EOF) {
			return checkError(expected, nil)
		} else if err != nil {
			return checkError(expected, err)
		}
	}
}

func checkError(expected any, err error) error {
	if expected == nil || err == nil {
		if expected != nil {
			return errors.New("it did not fail")
		}
		return err
	}
	var failure *memstream.Error
	if !errors.As(memstream.AsError(err), &failure) {
		return err
	}
	if expected.(object)["broken"] == true {
		switch failure.Code {
		case codes.Unavailable, codes.Internal, codes.Unknown, codes.Canceled:
			return nil
		}
		return err
	}
	actual := object{"code": codeName(failure.Code), "reason": reasonName(failure), "details": object{}}
	for key, value := range failure.Details {
		actual["details"].(object)[key] = value
	}
	var violations []any
	for _, one := range failure.Violations {
		violations = append(violations, one.GetField())
	}
	actual["violations"] = violations
	return compare(expected, actual, "error")
}

func codeName(code codes.Code) string {
	return map[codes.Code]string{
		codes.InvalidArgument: "INVALID_ARGUMENT", codes.NotFound: "NOT_FOUND", codes.AlreadyExists: "ALREADY_EXISTS",
		codes.Aborted: "ABORTED", codes.OutOfRange: "OUT_OF_RANGE", codes.DeadlineExceeded: "DEADLINE_EXCEEDED",
		codes.ResourceExhausted: "RESOURCE_EXHAUSTED", codes.Unauthenticated: "UNAUTHENTICATED",
		codes.PermissionDenied: "PERMISSION_DENIED", codes.FailedPrecondition: "FAILED_PRECONDITION",
	}[code]
}

func reasonName(failure *memstream.Error) string {
	return strings.TrimPrefix(failure.Reason.String(), "ERROR_REASON_")
}
