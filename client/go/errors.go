package memstream

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"

	v1 "memstream.dev/go/memstream/v1"
)

const (
	errorDomain  = "memstream.dev"
	reasonPrefix = "ERROR_REASON_"
)

// Error is the error of every call of this package.
type Error struct {
	// Code is the gRPC status code.
	Code codes.Code
	// Reason is the cause; error.proto says what to do about each. Unspecified if the status came from a proxy, the
	// transport or this package.
	Reason v1.ErrorReason
	// Message is for people.
	Message string
	// Details belong to the reason, for instance "expected_sequence".
	Details map[string]string
	// Violations name the invalid fields, for INVALID_FIELD.
	Violations []*errdetails.BadRequest_FieldViolation
	// RetryAfter is the time to wait before a retry; 0 if the server gives none.
	RetryAfter time.Duration

	wire  *spb.Status // the received status, with details that this package does not know; nil if this package made the error
	cause error
}

// ServerBehindError ends an Observe stream whose server expects a lower number than it had acknowledged, while the stream
// no longer buffers the observations between: the server was restored from an older backup, or the memory was recreated.
// A new stream continues at ExpectedSequence; the caller must resend the observations from that number on.
type ServerBehindError struct {
	ExpectedSequence, Acknowledged int64
}

// ErrClosed is returned by a stream or client that is used after it was closed or abandoned.
var ErrClosed = errors.New("memstream: the stream or client is closed")

func (e *Error) Error() string {
	if e.Reason == v1.ErrorReason_ERROR_REASON_UNSPECIFIED {
		return fmt.Sprintf("memstream: %s: %s", e.Code, e.Message)
	}
	return fmt.Sprintf("memstream: %s: %s", e.Reason.String()[len(reasonPrefix):], e.Message)
}

// GRPCStatus returns the status with all its details, for status.FromError, status.Convert and status.Code.
func (e *Error) GRPCStatus() *status.Status {
	if e.wire != nil {
		return status.FromProto(e.wire)
	}
	var details []protoadapt.MessageV1
	if e.Reason != v1.ErrorReason_ERROR_REASON_UNSPECIFIED {
		details = append(details, protoadapt.MessageV1Of(&errdetails.ErrorInfo{
			Domain: errorDomain, Reason: e.Reason.String()[len(reasonPrefix):], Metadata: e.Details,
		}))
	}
	if len(e.Violations) > 0 {
		details = append(details, protoadapt.MessageV1Of(&errdetails.BadRequest{FieldViolations: e.Violations}))
	}
	plain := status.New(e.Code, e.Message)
	if detailed, err := plain.WithDetails(details...); err == nil {
		return detailed
	}
	return plain // OK has no details, and no error is OK
}

// Unwrap is what it failed with before it was an Error: that of a token source, for instance. Else nil.
func (e *Error) Unwrap() error { return e.cause }

// Is makes errors.Is(err, context.DeadlineExceeded) and context.Canceled true where they are meant.
func (e *Error) Is(target error) bool {
	return target == context.DeadlineExceeded && e.Code == codes.DeadlineExceeded ||
		target == context.Canceled && e.Code == codes.Canceled
}

// Transient says that the same call may succeed later: wait RetryAfter, if given, and try again.
func (e *Error) Transient() bool {
	if value := e.Reason.Descriptor().Values().ByNumber(e.Reason.Number()); value != nil {
		if rule, ok := proto.GetExtension(value.Options(), v1.E_Rule).(*v1.ErrorRule); ok && rule != nil {
			return rule.GetTransient()
		}
	}
	switch e.Code {
	case codes.Unavailable, codes.DeadlineExceeded, codes.ResourceExhausted:
		return true
	}
	return false
}

func (e *ServerBehindError) Error() string {
	return fmt.Sprintf("memstream: the server expects observation %d although it had acknowledged %d: it was restored "+
		"from an older backup, or the memory was recreated. Open a new stream of this producer and send the observations "+
		"from %[1]d on again", e.ExpectedSequence, e.Acknowledged)
}

// GRPCStatus returns DATA_LOSS, for status.Code.
func (e *ServerBehindError) GRPCStatus() *status.Status { return status.New(codes.DataLoss, e.Error()) }

// HasReason reports whether err is an Error with that reason.
func HasReason(err error, reason v1.ErrorReason) bool {
	var own *Error
	return errors.As(err, &own) && own.Reason == reason
}

// AsError returns the Error for the error of a generated client; nil for nil.
func AsError(err error) error {
	var own *Error
	var behind *ServerBehindError
	if err == nil || errors.As(err, &own) || errors.As(err, &behind) || errors.Is(err, ErrClosed) {
		return err
	}
	if grpcStatus, ok := status.FromError(err); ok {
		return fromStatus(grpcStatus.Proto())
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return fromStatus(status.FromContextError(err).Proto())
	}
	return err
}

func fromStatus(wire *spb.Status) *Error {
	found := &Error{Code: codes.Code(wire.GetCode()), Message: wire.GetMessage(), wire: wire}
	for _, detail := range status.FromProto(wire).Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.GetDomain() == errorDomain {
				found.Reason = v1.ErrorReason(v1.ErrorReason_value[reasonPrefix+detail.GetReason()])
				found.Details = detail.GetMetadata()
			}
		case *errdetails.BadRequest:
			found.Violations = detail.GetFieldViolations()
		case *errdetails.RetryInfo:
			found.RetryAfter = detail.GetRetryDelay().AsDuration()
		}
	}
	return found
}

// tokenError returns the error of a call for which the token source failed.
func tokenError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return AsError(ctx.Err())
	}
	failed := &Error{Code: codes.Unauthenticated, Message: "cannot get a token: " + err.Error(), cause: err}
	if grpcStatus, ok := status.FromError(err); ok {
		failed.Code = grpcStatus.Code()
	}
	return failed
}

func unavailableError(message string) *Error {
	return &Error{Code: codes.Unavailable, Message: message}
}

func shuttingDownError(going *v1.GoingAway) *Error {
	message := going.GetDescription()
	if message == "" {
		message = "the server is going away"
	}
	return &Error{Code: codes.Unavailable, Reason: v1.ErrorReason_ERROR_REASON_SHUTTING_DOWN, Message: message}
}

func protocolViolationError(message string) *Error {
	return &Error{
		Code: codes.FailedPrecondition, Reason: v1.ErrorReason_ERROR_REASON_PROTOCOL_VIOLATION, Message: message,
	}
}

// notOpenedError returns the error of a stream on which the server answered `open` with another message.
func notOpenedError(response proto.Message) *Error {
	answer := "nothing"
	message := response.ProtoReflect()
	if field := message.WhichOneof(message.Descriptor().Oneofs().ByName("message")); field != nil {
		answer = string(field.Name())
	}
	return protocolViolationError("the server answered open with " + answer)
}

func invalidField(field, description string) *Error {
	return &Error{
		Code:       codes.InvalidArgument,
		Reason:     v1.ErrorReason_ERROR_REASON_INVALID_FIELD,
		Message:    field + ": " + description,
		Violations: []*errdetails.BadRequest_FieldViolation{{Field: field, Description: description}},
	}
}

// isCut reports whether to reopen a stream after err: transport failures, transient errors, and errors about numbers and
// flow control, which the next `opened` resolves.
func isCut(err error) bool {
	var own *Error
	if !errors.As(err, &own) {
		return false
	}
	switch own.Reason {
	case v1.ErrorReason_ERROR_REASON_UNSPECIFIED:
	case v1.ErrorReason_ERROR_REASON_SEQUENCE_GAP, v1.ErrorReason_ERROR_REASON_WINDOW_EXCEEDED:
		return true
	default:
		return own.Transient()
	}
	switch own.Code {
	// RST_STREAM is INTERNAL, CANCELLED or UNKNOWN; a proxy's timeout is DEADLINE_EXCEEDED.
	case codes.Unavailable, codes.Internal, codes.Unknown, codes.Canceled, codes.DeadlineExceeded:
		return true
	}
	return false
}
