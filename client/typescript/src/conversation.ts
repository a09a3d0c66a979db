/** One conversation: the messages of an agent framework or of DB-GPT, and the conversation as a whole. */
import type { MessageInitShape } from "@bufbuild/protobuf";

import {
  AppendMessagesRequestSchema,
  ConversationMessageSchema,
  GetStatesRequestSchema,
  ListConversationsRequestSchema,
  ListMessagesRequestSchema,
  SetStateRequestSchema,
  UpdateConversationRequestSchema,
  WriteTogetherRequestSchema,
} from "./gen/memstream/v1/conversation_service_pb.js";
import type {
  AppendMessagesResponse,
  Conversation as ConversationInfo,
  ConversationMessage,
  RemoveMessagesRequestSchema,
  State,
  StateScope,
  TransactionResult,
  TransactionWriteSchema,
} from "./gen/memstream/v1/conversation_service_pb.js";
import { checkedMessage, checkOptions } from "./checks.js";
import { protocolViolationError } from "./errors.js";
import type { Link, MemoryPath } from "./link.js";

/** A message to append: any fields of the contract's ConversationMessage. `body` is JSON as text, up to 4 MiB. */
export type NewMessage = MessageInitShape<typeof ConversationMessageSchema>;

/** What must hold for messages to be appended; at most one. */
export interface AppendCondition {
  /** The number of the last message; 0: there is none. Otherwise the error has the reason ETAG_MISMATCH. */
  readonly lastNumber?: bigint;
  /** The conversation does not exist. Otherwise the error has the reason MEMORY_EXISTS. */
  readonly absent?: boolean;
}

/** What must hold for messages or a conversation to be deleted. */
export interface DeleteCondition {
  /** The number of the last message; 0: there is none. Otherwise the error has the reason ETAG_MISMATCH. */
  readonly lastNumber?: bigint;
}

/** A write of a transaction: the contract's TransactionWrite. */
export type Write = MessageInitShape<typeof TransactionWriteSchema>;

/** A state document by its place. */
export interface StateKey {
  readonly scope: StateScope;
  /** The name of the application, the user, or the session's conversation. */
  readonly name: string;
}

/** What must hold for a state document to be written; at most one. Otherwise the error has the reason ETAG_MISMATCH. */
export interface StateCondition {
  /** The etag that was read. */
  readonly etag?: string;
  /** There is no such document. */
  readonly absent?: boolean;
}

const STATES_MAX = 1_000;

/** Which messages to list: fields of the contract's ListMessagesRequest. */
export type MessageQuery = Omit<MessageInitShape<typeof ListMessagesRequestSchema>, "$typeName" | "namespace" | "conversation">;

/** Which conversations to list: fields of the contract's ListConversationsRequest. */
export type ConversationQuery = Omit<MessageInitShape<typeof ListConversationsRequestSchema>, "$typeName" | "namespace">;

/** What to change: fields of the contract's UpdateConversationRequest. */
export type ConversationChange = Omit<
  MessageInitShape<typeof UpdateConversationRequestSchema>, "$typeName" | "namespace" | "conversation"
>;

type Which = MessageInitShape<typeof RemoveMessagesRequestSchema>["which"];

/**
 * A conversation, created by `Client.conversation`. The first message creates it; before that, methods that read or change
 * it reject with the reason CONVERSATION_NOT_FOUND.
 */
export class Conversation {
  constructor(
    private readonly link: Link,
    readonly path: MemoryPath,
  ) {}

  private get named(): { namespace: string; conversation: string } {
    return { namespace: this.path.namespace, conversation: this.path.name };
  }

  /** Appends messages, all or none. A message whose `clientId` is there already is not appended again. */
  async append(messages: readonly NewMessage[], condition: AppendCondition = {}): Promise<AppendMessagesResponse> {
    checkOptions("condition", condition, { lastNumber: true, absent: true });
    const { lastNumber, absent } = condition;
    const precondition = lastNumber !== undefined
      ? { case: "lastNumber" as const, value: lastNumber }
      : absent ? { case: "absent" as const, value: true } : { case: undefined };
    const request = { ...this.named, messages: [...messages], precondition };
    return this.link.conversations.appendMessages(checkedMessage("request", AppendMessagesRequestSchema, request));
  }

  /** The messages that match, over all pages. */
  async *messages(query: MessageQuery = {}): AsyncGenerator<ConversationMessage, void, undefined> {
    let { pageToken = "" } = query;
    do {
      const request = checkedMessage("query", ListMessagesRequestSchema, { ...query, ...this.named, pageToken });
      const page = await this.link.conversations.listMessages(request);
      yield* page.messages;
      pageToken = page.nextPageToken;
    } while (pageToken !== "");
  }

  /** The message with that number. */
  async message(number: bigint): Promise<ConversationMessage> {
    return present((await this.link.conversations.getMessage({ ...this.named, number })).message);
  }

  /** The message with that `clientId`. */
  async messageById(clientId: string): Promise<ConversationMessage> {
    return present((await this.link.conversations.getMessage({ ...this.named, clientId })).message);
  }

  /** The last message. */
  async lastMessage(): Promise<ConversationMessage> {
    return present((await this.link.conversations.getLastMessage(this.named)).message);
  }

  /** Replaces the message with that number, and returns the new one, without its body. */
  async replaceMessage(number: bigint, message: NewMessage): Promise<ConversationMessage> {
    const { namespace, conversation } = this.named;
    const given = checkedMessage("message", ConversationMessageSchema, { ...message, conversation, number });
    return present((await this.link.conversations.replaceMessage({ namespace, message: given })).message);
  }

  /** Deletes these messages, or none if one is not there; returns how many. */
  async removeMessages(numbers: readonly bigint[], condition: DeleteCondition = {}): Promise<bigint> {
    return this.remove({ case: "numbers", value: { numbers: [...numbers] } }, condition);
  }

  /** Deletes the oldest messages, so many or all, and returns how many. */
  async removeOldest(count: bigint, condition: DeleteCondition = {}): Promise<bigint> {
    return this.remove({ case: "oldest", value: count }, condition);
  }

  /** Deletes the message with that number and all after it, and returns how many. */
  async truncate(fromNumber: bigint, condition: DeleteCondition = {}): Promise<bigint> {
    return this.remove({ case: "fromNumber", value: fromNumber }, condition);
  }

  private async remove(which: NonNullable<Which>, condition: DeleteCondition): Promise<bigint> {
    checkOptions("condition", condition, { lastNumber: true });
    return (await this.link.conversations.removeMessages({ ...this.named, which, ...condition })).removed;
  }

  /** Deletes the last message and returns it. */
  async popMessage(condition: DeleteCondition = {}): Promise<ConversationMessage> {
    checkOptions("condition", condition, { lastNumber: true });
    return present((await this.link.conversations.popMessage({ ...this.named, ...condition })).message);
  }

  /** Its labels, counts and times. */
  async describe(): Promise<ConversationInfo> {
    return present((await this.link.conversations.getConversation(this.named)).conversation);
  }

  /** Sets labels, time to live or the memory to feed; may create the conversation (`existence`). */
  async update(change: ConversationChange): Promise<ConversationInfo> {
    const request = checkedMessage("change", UpdateConversationRequestSchema, { ...change, ...this.named });
    return present((await this.link.conversations.updateConversation(request)).conversation);
  }

  /** Copies it up to a message (0: all) to a new conversation of its namespace. */
  async fork(name: string, number = 0n): Promise<Conversation> {
    await this.link.conversations.forkConversation({ ...this.named, newConversation: name, number });
    return new Conversation(this.link, { namespace: this.path.namespace, name });
  }

  /** Completes it, which ends its watches. A later message opens it again. */
  async complete(): Promise<void> {
    await this.link.conversations.completeConversation(this.named);
  }

  /** Deletes it with messages, plans and state, and returns how many messages it had. */
  async delete(condition: DeleteCondition = {}): Promise<bigint> {
    checkOptions("condition", condition, { lastNumber: true });
    return (await this.link.conversations.deleteConversation({ ...this.named, ...condition })).messages;
  }
}

/** The conversations of a namespace that match, over all pages. */
export async function* listConversations(
  link: Link, namespace: string, query: ConversationQuery,
): AsyncGenerator<ConversationInfo, void, undefined> {
  let { pageToken = "" } = query;
  do {
    const request = checkedMessage("query", ListConversationsRequestSchema, { ...query, namespace, pageToken });
    const page = await link.conversations.listConversations(request);
    yield* page.conversations;
    pageToken = page.nextPageToken;
  } while (pageToken !== "");
}

/** Does the writes in one transaction, all or none. `memory`: the one that fragments are put into. */
export async function writeTogether(
  link: Link, namespace: string, writes: readonly Write[], memory: string,
): Promise<TransactionResult[]> {
  const request = checkedMessage("request", WriteTogetherRequestSchema, { namespace, memory, writes: [...writes] });
  return (await link.conversations.writeTogether(request)).results;
}

/** Those of the state documents that exist, in the order of the keys. */
export async function getStates(link: Link, namespace: string, keys: readonly StateKey[]): Promise<State[]> {
  const found: State[] = [];
  for (let place = 0; place < keys.length;) {
    const asked = keys.slice(place, place + STATES_MAX).map(({ scope, name }) => ({ scope, name }));
    const request = checkedMessage("request", GetStatesRequestSchema, { namespace, keys: asked });
    const answer = await link.conversations.getStates(request);
    found.push(...answer.states);
    place += Math.max(1, answer.answered);
  }
  return found;
}

/** Writes a state document; the answer has no document. */
export async function setState(
  link: Link, namespace: string, key: StateKey, document: string, condition: StateCondition,
): Promise<State> {
  checkOptions("condition", condition, { etag: true, absent: true });
  const { etag, absent } = condition;
  const precondition = etag !== undefined
    ? { case: "etag" as const, value: etag }
    : absent ? { case: "absent" as const, value: true } : { case: undefined };
  const request = checkedMessage("request", SetStateRequestSchema, { namespace, ...key, document, precondition });
  return present((await link.conversations.setState(request)).state);
}

function present<T>(value: T | undefined): T {
  if (value === undefined) throw protocolViolationError("the server's answer is incomplete");
  return value;
}
