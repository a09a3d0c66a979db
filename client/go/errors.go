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
	"google.golang.org/protobuf/protoadapt"

	v1 "memstream.dev/go/memstream/v1"
)

const (
	errorDomain  = "memstream.dev"
	reasonPrefix = "ERROR_REASON_"
)

// Error is what every call of this package fails with.
type Error struct {
	// Code is the gRPC status code.
	Code codes.Code
	// Reason says why, and what to do: see error.proto. Unspecified when the status came from a proxy, the transport
	// or this package.
	Reason v1.ErrorReason
	// Message is for people.
	Message string
	// Details belong to the reason, for instance "expected_sequence".
	Details map[string]string
	// Violations say which fields are wrong, under INVALID_FIELD.
	Violations []*errdetails.BadRequest_FieldViolation
	// RetryAfter is the time to wait before a retry; 0 where the server says nothing.
	RetryAfter time.Duration

	said  *spb.Status // as it came, with details that this package does not know; nil for an error made here
	cause error
}

// ServerBehindError ends an Observe stream whose server expects a lower number than it had acknowledged, while what
// lies between is no longer held here: it was restored from an older backup, or the memory was made anew. A new
// stream goes on from ExpectedSequence; what was numbered from there on is the caller's to send again.
type ServerBehindError struct {
	ExpectedSequence, Acknowledged int64
}

// ErrClosed is returned by what is used after it was closed or abandoned.
var ErrClosed = errors.New("memstream: closed")

func (e *Error) Error() string {
	if e.Reason == v1.ErrorReason_ERROR_REASON_UNSPECIFIED {
		return fmt.Sprintf("memstream: %s: %s", e.Code, e.Message)
	}
	return fmt.Sprintf("memstream: %s: %s", e.Reason.String()[len(reasonPrefix):], e.Message)
}

// GRPCStatus lets status.FromError, status.Convert and status.Code see the status, with all its details.
func (e *Error) GRPCStatus() *status.Status {
	if e.said != nil {
		return status.FromProto(e.said)
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
	switch e.Code {
	case codes.Unavailable, codes.DeadlineExceeded:
		return true
	case codes.ResourceExhausted:
		return e.Reason != v1.ErrorReason_ERROR_REASON_WINDOW_EXCEEDED
	}
	return false
}

func (e *ServerBehindError) Error() string {
	return fmt.Sprintf("memstream: the server expects observation %d although it had acknowledged %d: it was restored "+
		"from an older backup, or the memory was made anew; open a new stream and send again what it lacks",
		e.ExpectedSequence, e.Acknowledged)
}

// GRPCStatus lets status.Code see DATA_LOSS.
func (e *ServerBehindError) GRPCStatus() *status.Status { return status.New(codes.DataLoss, e.Error()) }

// HasReason says whether err is an Error of that reason.
func HasReason(err error, reason v1.ErrorReason) bool {
	var own *Error
	return errors.As(err, &own) && own.Reason == reason
}

// AsError gives the Error for whatever a generated client returned; nil for nil.
func AsError(err error) error {
	var own *Error
	var behind *ServerBehindError
	if err == nil || errors.As(err, &own) || errors.As(err, &behind) || errors.Is(err, ErrClosed) {
		return err
	}
	if said, ok := status.FromError(err); ok {
		return fromStatus(said.Proto())
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return fromStatus(status.FromContextError(err).Proto())
	}
	return err
}

func fromStatus(said *spb.Status) *Error {
	found := &Error{Code: codes.Code(said.GetCode()), Message: said.GetMessage(), said: said}
	for _, detail := range status.FromProto(said).Details() {
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

// tokenError is what a call fails with that got no token.
func tokenError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return AsError(ctx.Err())
	}
	failed := &Error{Code: codes.Unauthenticated, Message: "there is no token: " + err.Error(), cause: err}
	if said, ok := status.FromError(err); ok {
		failed.Code = said.Code()
	}
	return failed
}

func unavailable(message string) *Error { return &Error{Code: codes.Unavailable, Message: message} }

func shuttingDown(going *v1.GoingAway) *Error {
	said := going.GetDescription()
	if said == "" {
		said = "the server is going away"
	}
	return &Error{Code: codes.Unavailable, Reason: v1.ErrorReason_ERROR_REASON_SHUTTING_DOWN, Message: said}
}

func invalid(field, description string) *Error {
	return &Error{
		Code:       codes.InvalidArgument,
		Reason:     v1.ErrorReason_ERROR_REASON_INVALID_FIELD,
		Message:    field + " " + description,
		Violations: []*errdetails.BadRequest_FieldViolation{{Field: field, Description: description}},
	}
}

// isCut says whether a stream that ended so is to be opened again: transport failures, what the server says will
// pass, and disagreements about numbers and credits, which every `opened` settles anew.
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
	// RST_STREAM is INTERNAL, CANCELLED or UNKNOWN, a proxy's own time limit DEADLINE_EXCEEDED.
	case codes.Unavailable, codes.Internal, codes.Unknown, codes.Canceled, codes.DeadlineExceeded:
		return true
	}
	return false
}
