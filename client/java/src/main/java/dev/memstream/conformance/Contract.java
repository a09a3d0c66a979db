package dev.memstream.conformance;

import com.google.gson.JsonElement;
import com.google.gson.JsonParser;
import com.google.protobuf.Descriptors.Descriptor;
import com.google.protobuf.Descriptors.FileDescriptor;
import com.google.protobuf.Descriptors.MethodDescriptor;
import com.google.protobuf.Descriptors.ServiceDescriptor;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.protobuf.util.JsonFormat;
import com.google.rpc.ErrorInfo;
import dev.memstream.v1.BlockServiceProto;
import dev.memstream.v1.ContextServiceProto;
import dev.memstream.v1.ConversationServiceProto;
import dev.memstream.v1.ErrorProto;
import dev.memstream.v1.EventProto;
import dev.memstream.v1.FragmentProto;
import dev.memstream.v1.MemoryProto;
import dev.memstream.v1.MemoryServiceProto;
import dev.memstream.v1.OperationProto;
import dev.memstream.v1.OperationServiceProto;
import dev.memstream.v1.ScopeProto;
import dev.memstream.v1.ServerServiceProto;
import dev.memstream.v1.StreamServiceProto;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** The generated messages and services by name, and the conversion of messages to and from JSON. */
final class Contract {
  private static final List<FileDescriptor> FILES = List.of(
      BlockServiceProto.getDescriptor(), ContextServiceProto.getDescriptor(), ConversationServiceProto.getDescriptor(),
      ErrorProto.getDescriptor(), EventProto.getDescriptor(),
      FragmentProto.getDescriptor(), MemoryProto.getDescriptor(), MemoryServiceProto.getDescriptor(),
      OperationProto.getDescriptor(), OperationServiceProto.getDescriptor(), ScopeProto.getDescriptor(),
      ServerServiceProto.getDescriptor(), StreamServiceProto.getDescriptor());
  private static final JsonFormat.TypeRegistry TYPES =
      JsonFormat.TypeRegistry.newBuilder().add(ErrorInfo.getDescriptor()).build();
  private static final Map<String, ServiceDescriptor> SERVICES = new HashMap<>();
  private static final Map<String, Message> MESSAGES = messages();

  static {
    FILES.forEach(file -> file.getServices().forEach(service -> SERVICES.put(service.getName(), service)));
  }

  private Contract() {}

  private static Map<String, Message> messages() {
    Map<String, Message> found = new HashMap<>();
    try {
      for (FileDescriptor file : FILES) {
        for (Descriptor one : file.getMessageTypes()) {
          Class<?> made = Class.forName(file.getOptions().getJavaPackage() + "." + one.getName());
          found.put(one.getFullName(), (Message) made.getMethod("getDefaultInstance").invoke(null));
        }
      }
    } catch (ReflectiveOperationException defect) {
      throw new IllegalStateException(defect);
    }
    return found;
  }

  /** Returns an empty message with that full name. */
  static Message message(String name) {
    return MESSAGES.get(name);
  }

  /** Returns the method "Service/Method". */
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
