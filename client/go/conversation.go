package memstream

import (
	"context"
	"iter"

	"google.golang.org/protobuf/proto"

	v1 "memstream.dev/go/memstream/v1"
)

// Conversation is one conversation of a server, created by [Client.Conversation]. The first message creates it; before
// that, methods that read or change it fail with the reason CONVERSATION_NOT_FOUND.
type Conversation struct {
	// Namespace and Name identify it.
	Namespace, Name string

	client *Client
}

// Conversation returns the conversation "namespace/name" without checking that it exists.
func (c *Client) Conversation(path string) (*Conversation, error) {
	namespace, name, err := splitPath("conversation", path)
	if err != nil {
		return nil, err
	}
	return &Conversation{Namespace: namespace, Name: name, client: c}, nil
}

// ListConversations returns the conversations that match query, over all pages. It ends after the first error.
func (c *Client) ListConversations(
	ctx context.Context, query *v1.ListConversationsRequest,
) iter.Seq2[*v1.Conversation, error] {
	request := proto.CloneOf(query)
	return pages(func() ([]*v1.Conversation, string, error) {
		page, err := c.Conversations.ListConversations(ctx, request)
		request.PageToken = page.GetNextPageToken()
		return page.GetConversations(), request.PageToken, err
	})
}

// String returns "namespace/name".
func (c *Conversation) String() string { return c.Namespace + "/" + c.Name }

// Append appends messages, all or none. A message whose ClientId is there already is not appended again.
func (c *Conversation) Append(
	ctx context.Context, messages ...*v1.ConversationMessage,
) (*v1.AppendMessagesResponse, error) {
	return c.append(ctx, &v1.AppendMessagesRequest{Messages: messages})
}

// AppendAfter appends messages if lastNumber is the number of the last one (0: there is none). Otherwise the error has
// the reason ETAG_MISMATCH.
func (c *Conversation) AppendAfter(
	ctx context.Context, lastNumber int64, messages ...*v1.ConversationMessage,
) (*v1.AppendMessagesResponse, error) {
	return c.append(ctx, &v1.AppendMessagesRequest{
		Messages: messages, Precondition: &v1.AppendMessagesRequest_LastNumber{LastNumber: lastNumber},
	})
}

// AppendNew creates the conversation with messages. If it exists, the error has the reason MEMORY_EXISTS.
func (c *Conversation) AppendNew(
	ctx context.Context, messages ...*v1.ConversationMessage,
) (*v1.AppendMessagesResponse, error) {
	return c.append(ctx, &v1.AppendMessagesRequest{
		Messages: messages, Precondition: &v1.AppendMessagesRequest_Absent{Absent: true},
	})
}

func (c *Conversation) append(
	ctx context.Context, request *v1.AppendMessagesRequest,
) (*v1.AppendMessagesResponse, error) {
	request.Namespace, request.Conversation = c.Namespace, c.Name
	return c.client.Conversations.AppendMessages(ctx, request)
}

// Messages returns the messages that match query, over all pages; nil matches all. It ends after the first error.
func (c *Conversation) Messages(
	ctx context.Context, query *v1.ListMessagesRequest,
) iter.Seq2[*v1.ConversationMessage, error] {
	request := &v1.ListMessagesRequest{}
	proto.Merge(request, query)
	request.Namespace, request.Conversation = c.Namespace, c.Name
	return pages(func() ([]*v1.ConversationMessage, string, error) {
		page, err := c.client.Conversations.ListMessages(ctx, request)
		request.PageToken = page.GetNextPageToken()
		return page.GetMessages(), request.PageToken, err
	})
}

// Message returns the message with that number.
func (c *Conversation) Message(ctx context.Context, number int64) (*v1.ConversationMessage, error) {
	answer, err := c.client.Conversations.GetMessage(ctx, &v1.GetMessageRequest{
		Namespace: c.Namespace, Conversation: c.Name, Number: number,
	})
	return answer.GetMessage(), err
}

// MessageByID returns the message with that ClientId.
func (c *Conversation) MessageByID(ctx context.Context, clientID string) (*v1.ConversationMessage, error) {
	answer, err := c.client.Conversations.GetMessage(ctx, &v1.GetMessageRequest{
		Namespace: c.Namespace, Conversation: c.Name, ClientId: clientID,
	})
	return answer.GetMessage(), err
}

// LastMessage returns the last message.
func (c *Conversation) LastMessage(ctx context.Context) (*v1.ConversationMessage, error) {
	answer, err := c.client.Conversations.GetLastMessage(ctx, &v1.GetLastMessageRequest{
		Namespace: c.Namespace, Conversation: c.Name,
	})
	return answer.GetMessage(), err
}

// ReplaceMessage replaces the message with that number and returns the new one, without its body.
func (c *Conversation) ReplaceMessage(
	ctx context.Context, number int64, message *v1.ConversationMessage,
) (*v1.ConversationMessage, error) {
	named := proto.CloneOf(message)
	named.Conversation, named.Number = c.Name, number
	answer, err := c.client.Conversations.ReplaceMessage(ctx, &v1.ReplaceMessageRequest{
		Namespace: c.Namespace, Message: named,
	})
	return answer.GetMessage(), err
}

// RemoveMessages deletes these messages, or none if one is not there.
func (c *Conversation) RemoveMessages(ctx context.Context, numbers ...int64) (int64, error) {
	return c.remove(ctx, &v1.RemoveMessagesRequest{
		Which: &v1.RemoveMessagesRequest_Numbers{Numbers: &v1.MessageNumbers{Numbers: numbers}},
	})
}

// RemoveOldest deletes the oldest messages, so many or all, and returns how many.
func (c *Conversation) RemoveOldest(ctx context.Context, count int64) (int64, error) {
	return c.remove(ctx, &v1.RemoveMessagesRequest{Which: &v1.RemoveMessagesRequest_Oldest{Oldest: count}})
}

// Truncate deletes the message with that number and all after it, and returns how many.
func (c *Conversation) Truncate(ctx context.Context, fromNumber int64) (int64, error) {
	return c.remove(ctx, &v1.RemoveMessagesRequest{
		Which: &v1.RemoveMessagesRequest_FromNumber{FromNumber: fromNumber},
	})
}

// Remove deletes the messages that request names, on its condition LastNumber.
func (c *Conversation) Remove(
	ctx context.Context, request *v1.RemoveMessagesRequest,
) (*v1.RemoveMessagesResponse, error) {
	named := proto.CloneOf(request)
	named.Namespace, named.Conversation = c.Namespace, c.Name
	return c.client.Conversations.RemoveMessages(ctx, named)
}

func (c *Conversation) remove(ctx context.Context, request *v1.RemoveMessagesRequest) (int64, error) {
	answer, err := c.Remove(ctx, request)
	return answer.GetRemoved(), err
}

// PopMessage deletes the last message and returns it.
func (c *Conversation) PopMessage(ctx context.Context) (*v1.ConversationMessage, error) {
	answer, err := c.client.Conversations.PopMessage(ctx, &v1.PopMessageRequest{
		Namespace: c.Namespace, Conversation: c.Name,
	})
	return answer.GetMessage(), err
}

// PopMessageAt deletes the last message and returns it if lastNumber is its number. Otherwise the error has the reason
// ETAG_MISMATCH.
func (c *Conversation) PopMessageAt(ctx context.Context, lastNumber int64) (*v1.ConversationMessage, error) {
	answer, err := c.client.Conversations.PopMessage(ctx, &v1.PopMessageRequest{
		Namespace: c.Namespace, Conversation: c.Name, LastNumber: &lastNumber,
	})
	return answer.GetMessage(), err
}

// Describe returns its labels, counts and times.
func (c *Conversation) Describe(ctx context.Context) (*v1.Conversation, error) {
	answer, err := c.client.Conversations.GetConversation(ctx, &v1.GetConversationRequest{
		Namespace: c.Namespace, Conversation: c.Name,
	})
	return answer.GetConversation(), err
}

// Update sets the fields that change sets: labels, time to live, the memory to feed; it may create the conversation.
func (c *Conversation) Update(
	ctx context.Context, change *v1.UpdateConversationRequest,
) (*v1.Conversation, error) {
	request := proto.CloneOf(change)
	request.Namespace, request.Conversation = c.Namespace, c.Name
	answer, err := c.client.Conversations.UpdateConversation(ctx, request)
	return answer.GetConversation(), err
}

// Fork copies it up to a message (0: all) to a new conversation of its namespace.
func (c *Conversation) Fork(ctx context.Context, name string, number int64) (*Conversation, error) {
	_, err := c.client.Conversations.ForkConversation(ctx, &v1.ForkConversationRequest{
		Namespace: c.Namespace, Conversation: c.Name, NewConversation: name, Number: number,
	})
	if err != nil {
		return nil, err
	}
	return &Conversation{Namespace: c.Namespace, Name: name, client: c.client}, nil
}

// Complete completes it, which ends its watches. A later message opens it again.
func (c *Conversation) Complete(ctx context.Context) error {
	_, err := c.client.Conversations.CompleteConversation(ctx, &v1.CompleteConversationRequest{
		Namespace: c.Namespace, Conversation: c.Name,
	})
	return err
}

// Delete deletes it with messages, plans and state, and returns how many messages it had.
func (c *Conversation) Delete(ctx context.Context) (int64, error) {
	answer, err := c.client.Conversations.DeleteConversation(ctx, &v1.DeleteConversationRequest{
		Namespace: c.Namespace, Conversation: c.Name,
	})
	return answer.GetMessages(), err
}

// DeleteAt deletes it if lastNumber is the number of its last message (0: there is none). Otherwise the error has the
// reason ETAG_MISMATCH.
func (c *Conversation) DeleteAt(ctx context.Context, lastNumber int64) (int64, error) {
	answer, err := c.client.Conversations.DeleteConversation(ctx, &v1.DeleteConversationRequest{
		Namespace: c.Namespace, Conversation: c.Name, LastNumber: &lastNumber,
	})
	return answer.GetMessages(), err
}

// WriteTogether does the writes in one transaction, all or none, and returns the result of each. memory is the one that
// fragments are put into; empty without them.
func (c *Client) WriteTogether(
	ctx context.Context, namespace, memory string, writes ...*v1.TransactionWrite,
) ([]*v1.TransactionResult, error) {
	answer, err := c.Conversations.WriteTogether(ctx, &v1.WriteTogetherRequest{
		Namespace: namespace, Memory: memory, Writes: writes,
	})
	return answer.GetResults(), err
}

// State returns a state document. If there is none, the error has the reason CONVERSATION_NOT_FOUND.
func (c *Client) State(ctx context.Context, namespace string, scope v1.StateScope, name string) (*v1.State, error) {
	answer, err := c.Conversations.GetState(ctx, &v1.GetStateRequest{Namespace: namespace, Scope: scope, Name: name})
	return answer.GetState(), err
}

// States returns those of the state documents that exist, in the order of keys, at most 1,000 a call.
func (c *Client) States(ctx context.Context, namespace string, keys ...*v1.StateKey) ([]*v1.State, error) {
	var found []*v1.State
	for len(keys) > 0 {
		asked := keys[:min(len(keys), statesMax)]
		answer, err := c.Conversations.GetStates(ctx, &v1.GetStatesRequest{Namespace: namespace, Keys: asked})
		if err != nil {
			return nil, err
		}
		found = append(found, answer.GetStates()...)
		keys = keys[max(1, int(answer.GetAnswered())):]
	}
	return found, nil
}

// statesMax is how many state documents one call reads.
const statesMax = 1000

// SetState writes the state document that request names, on its condition Etag or Absent; otherwise the error has the
// reason ETAG_MISMATCH. The answer has no document.
func (c *Client) SetState(ctx context.Context, request *v1.SetStateRequest) (*v1.State, error) {
	answer, err := c.Conversations.SetState(ctx, request)
	return answer.GetState(), err
}

// DeleteState deletes a state document, and returns whether there was one. If etag is neither empty nor the present one,
// the error has the reason ETAG_MISMATCH.
func (c *Client) DeleteState(
	ctx context.Context, namespace string, scope v1.StateScope, name, etag string,
) (bool, error) {
	answer, err := c.Conversations.DeleteState(ctx, &v1.DeleteStateRequest{
		Namespace: namespace, Scope: scope, Name: name, Etag: etag,
	})
	return answer.GetDeleted(), err
}

// pages calls next until it returns no token, and yields the entries of its pages.
func pages[T any](next func() ([]T, string, error)) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		for {
			entries, token, err := next()
			if err != nil {
				var none T
				yield(none, err)
				return
			}
			for _, entry := range entries {
				if !yield(entry, nil) {
					return
				}
			}
			if token == "" {
				return
			}
		}
	}
}
