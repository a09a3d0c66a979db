package dev.memstream.conformance;

import com.google.gson.JsonElement;
import com.google.gson.JsonParser;
import com.google.protobuf.Descriptors.MethodDescriptor;
import com.google.protobuf.Descriptors.ServiceDescriptor;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.protobuf.util.JsonFormat;
import com.google.rpc.ErrorInfo;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import memstream.v1.ConversationServiceOuterClass;
import memstream.v1.Error;
import memstream.v1.EventOuterClass;
import memstream.v1.FragmentOuterClass;
import memstream.v1.MemoryOuterClass;
import memstream.v1.MemoryServiceOuterClass;
import memstream.v1.OperationOuterClass;
import memstream.v1.OperationServiceOuterClass;
import memstream.v1.ServerServiceOuterClass;
import memstream.v1.StreamServiceOuterClass;

/** The generated messages and services by name, and messages as JSON. */
final class Contract {
  private static final List<Class<?>> FILES = List.of(
      ConversationServiceOuterClass.class, Error.class, EventOuterClass.class, FragmentOuterClass.class,
      MemoryOuterClass.class, MemoryServiceOuterClass.class, OperationOuterClass.class,
      OperationServiceOuterClass.class, ServerServiceOuterClass.class, StreamServiceOuterClass.class);
  private static final JsonFormat.TypeRegistry TYPES =
      JsonFormat.TypeRegistry.newBuilder().add(ErrorInfo.getDescriptor()).build();
  private static final Map<String, ServiceDescriptor> SERVICES = new HashMap<>();
  private static final Map<String, Message> MESSAGES = messages();

  static {
    for (var file : List.of(
        ConversationServiceOuterClass.getDescriptor(), MemoryServiceOuterClass.getDescriptor(),
        OperationServiceOuterClass.getDescriptor(), ServerServiceOuterClass.getDescriptor(),
        StreamServiceOuterClass.getDescriptor())) {
      file.getServices().forEach(service -> SERVICES.put(service.getName(), service));
    }
  }

  private Contract() {}

  private static Map<String, Message> messages() {
    Map<String, Message> found = new HashMap<>();
    try {
      for (Class<?> file : FILES) {
        for (Class<?> one : file.getDeclaredClasses()) {
          if (Message.class.isAssignableFrom(one)) {
            Message empty = (Message) one.getMethod("getDefaultInstance").invoke(null);
            found.put(empty.getDescriptorForType().getFullName(), empty);
          }
        }
      }
    } catch (ReflectiveOperationException defect) {
      throw new IllegalStateException(defect);
    }
    return found;
  }

  /** An empty message of that full name. */
  static Message message(String name) {
    return MESSAGES.get(name);
  }

  /** The method "Service/Method". */
  static MethodDescriptor method(String name) {
    int slash = name.indexOf('/');
    return SERVICES.get(name.substring(0, slash)).findMethodByName(name.substring(slash + 1));
  }

  static JsonElement json(Message message) throws InvalidProtocolBufferException {
    return JsonParser.parseString(JsonFormat.printer().usingTypeRegistry(TYPES).print(message));
  }

  static Message read(Message empty, JsonElement json) throws InvalidProtocolBufferException {
    Message.Builder builder = empty.newBuilderForType();
    JsonFormat.parser().usingTypeRegistry(TYPES).merge(json.toString(), builder);
    return builder.build();
  }
}
