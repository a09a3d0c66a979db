package dev.memstream.conformance;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import dev.memstream.conformance.Matching.Mismatch;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientInterceptors;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status.Code;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.ProtoUtils;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.MetadataUtils;
import io.grpc.stub.StreamObserver;
import java.io.IOException;
import java.util.ArrayList;
import java.util.Base64;
import java.util.EnumSet;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;

/** Runs one case. Each stream has its own connection, so that a broken one affects no other. */
final class Case {
  private static final long READ_S = 30;
  private static final Set<Code> BROKEN =
      EnumSet.of(Code.UNAVAILABLE, Code.INTERNAL, Code.UNKNOWN, Code.CANCELLED);

  private final String address;
  private final Map<String, String> kept = new HashMap<>();
  private final Map<String, Stream> streams = new HashMap<>();
  private final List<ManagedChannel> channels = new ArrayList<>();
  private Channel calling;

  Case(String address) {
    this.address = address;
    kept.put("ns", "c-" + UUID.randomUUID().toString().substring(0, 13));
    calling = connect();
  }

  /** Runs the steps and returns the problem; empty if there is none. */
  String run(JsonArray steps) throws IOException, InterruptedException {
    int number = 0;
    try {
      for (JsonElement step : steps) {
        number++;
        runStep(Matching.fillPlaceholders(step, kept).getAsJsonObject());
      }
      return "";
    } catch (Mismatch wrong) {
      return "step " + number + ": " + wrong.getMessage();
    } finally {
      channels.forEach(ManagedChannel::shutdownNow);
    }
  }

  private Channel connect() {
    ManagedChannel made = ManagedChannelBuilder.forTarget(address).usePlaintext().build();
    channels.add(made);
    return made;
  }

  private void runStep(JsonObject step) throws IOException, InterruptedException, Mismatch {
    if (step.has("call")) {
      call(step);
    } else if (step.has("open")) {
      streams.put(step.get("open").getAsString(), new Stream(with(step, connect()), step.get("stream").getAsString()));
    } else if (step.has("send")) {
      streams.get(step.get("send").getAsString()).send(step);
    } else if (step.has("receive")) {
      streams.get(step.get("receive").getAsString()).receive(step.get("message"));
    } else if (step.has("finish")) {
      streams.get(step.get("finish").getAsString()).finish(step.get("error"));
    } else if (step.has("ask")) {
      Main.requestFault(step.get("ask").getAsString());
      calling = connect();
    } else if (!step.has("cancel")) { // the end of the case cancels all calls
      throw new Mismatch("unknown step: " + step);
    }
  }

  private static Channel with(JsonObject step, Channel channel) {
    Metadata headers = new Metadata();
    if (step.has("metadata")) {
      step.getAsJsonObject("metadata").entrySet().forEach(one -> headers.put(
          Metadata.Key.of(one.getKey(), Metadata.ASCII_STRING_MARSHALLER), one.getValue().getAsString()));
    }
    return ClientInterceptors.intercept(channel, MetadataUtils.newAttachHeadersInterceptor(headers));
  }

  private static MethodDescriptor<Message, Message> method(String name, MethodDescriptor.MethodType type) {
    var found = Contract.method(name);
    return MethodDescriptor.<Message, Message>newBuilder()
        .setType(type)
        .setFullMethodName(MethodDescriptor.generateFullMethodName(
            found.getService().getFullName(), found.getName()))
        .setRequestMarshaller(ProtoUtils.marshaller(Contract.message(found.getInputType().getFullName())))
        .setResponseMarshaller(ProtoUtils.marshaller(Contract.message(found.getOutputType().getFullName())))
        .build();
  }

  /** A method's request; the bytes of `unknown`, in base64, are fields that a later contract may have. */
  private static Message request(String method, JsonElement json, JsonObject step)
      throws InvalidProtocolBufferException {
    Message known = Contract.read(Contract.message(Contract.method(method).getInputType().getFullName()), json);
    byte[] unknown = Base64.getDecoder().decode(step.has("unknown") ? step.get("unknown").getAsString() : "");
    return known.toBuilder().mergeFrom(unknown).build();
  }

  private void call(JsonObject step) throws InvalidProtocolBufferException, Mismatch {
    String name = step.get("call").getAsString();
    long limit = step.has("timeoutS") ? (long) (step.get("timeoutS").getAsDouble() * 1000) : READ_S * 1000;
    CallOptions options = CallOptions.DEFAULT.withWaitForReady().withDeadlineAfter(limit, TimeUnit.MILLISECONDS);
    JsonElement actual;
    try {
      var method = method(name, MethodDescriptor.MethodType.UNARY);
      Message request = request(name, step.get("request"), step);
      actual = Contract.json(ClientCalls.blockingUnaryCall(with(step, calling), method, options, request));
    } catch (StatusRuntimeException failed) {
      checkError(step.get("error"), failed);
      return;
    }
    if (step.has("error")) {
      throw new Mismatch("it did not fail, it answered " + actual);
    }
    Matching.check(step.get("answer"), actual, "answer");
    if (step.has("keep")) {
      step.getAsJsonObject("keep").entrySet()
          .forEach(one -> kept.put(one.getKey(), Matching.valueAt(actual, one.getValue().getAsString())));
    }
  }

  private static void checkError(JsonElement expected, Throwable failed) throws InvalidProtocolBufferException, Mismatch {
    Code code = io.grpc.Status.fromThrowable(failed).getCode();
    if (expected == null) {
      throw new Mismatch("it failed: " + failed);
    }
    if (expected.getAsJsonObject().has("broken")) {
      if (!BROKEN.contains(code)) {
        throw new Mismatch("it failed with " + failed);
      }
      return;
    }
    JsonObject actual = new JsonObject();
    actual.addProperty("code", code.name());
    com.google.rpc.Status said = StatusProto.fromThrowable(failed);
    for (Any detail : said == null ? List.<Any>of() : said.getDetailsList()) {
      if (detail.is(ErrorInfo.class)) {
        ErrorInfo info = detail.unpack(ErrorInfo.class);
        JsonObject details = new JsonObject();
        info.getMetadataMap().forEach(details::addProperty);
        actual.addProperty("reason", info.getReason());
        actual.add("details", details);
      } else if (detail.is(BadRequest.class)) {
        JsonArray fields = new JsonArray();
        detail.unpack(BadRequest.class).getFieldViolationsList().forEach(one -> fields.add(one.getField()));
        actual.add("violations", fields);
      }
    }
    Matching.check(expected, actual, "error");
  }

  /** An open call. Queues the messages it receives, then the end of the call: a Throwable, or END. */
  private static final class Stream implements StreamObserver<Message> {
    private static final Object END = new Object();
    private final String name;
    private final BlockingQueue<Object> received = new LinkedBlockingQueue<>();
    private final StreamObserver<Message> requests;

    Stream(Channel channel, String name) {
      this.name = name;
      var method = method(name, MethodDescriptor.MethodType.BIDI_STREAMING); // all kinds of streams are alike on the wire
      requests = ClientCalls.asyncBidiStreamingCall(
          channel.newCall(method, CallOptions.DEFAULT.withWaitForReady()), this);
    }

    @Override
    public void onNext(Message message) {
      received.add(message);
    }

    @Override
    public void onError(Throwable failed) {
      received.add(failed);
    }

    @Override
    public void onCompleted() {
      received.add(END);
    }

    void send(JsonObject step) throws InvalidProtocolBufferException {
      requests.onNext(request(name, step.get("message"), step));
      if (!Contract.method(name).isClientStreaming()) {
        requests.onCompleted();
      }
    }

    /** Reads messages until one is as expected. */
    void receive(JsonElement expected) throws InterruptedException, InvalidProtocolBufferException, Mismatch {
      List<JsonElement> seen = new ArrayList<>();
      while (true) {
        if (!(received.poll(READ_S, TimeUnit.SECONDS) instanceof Message message)) {
          throw new Mismatch("the stream ended; received before: " + seen);
        }
        seen.add(Contract.json(message));
        try {
          Matching.check(expected, seen.get(seen.size() - 1), "message");
          return;
        } catch (Mismatch other) {
          continue;
        }
      }
    }

    void finish(JsonElement expected) throws InterruptedException, InvalidProtocolBufferException, Mismatch {
      if (expected == null && Contract.method(name).isClientStreaming()) {
        requests.onCompleted();
      }
      Object last = received.poll(READ_S, TimeUnit.SECONDS);
      while (last instanceof Message) {
        last = received.poll(READ_S, TimeUnit.SECONDS);
      }
      if (last instanceof Throwable failed) {
        checkError(expected, failed);
      } else if (last != END || expected != null) {
        throw new Mismatch("the stream ended without an error, or did not end");
      }
    }
  }
}
