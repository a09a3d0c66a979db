package dev.memstream.conformance;

import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import java.util.Arrays;
import java.util.Base64;

/** Checks that golden messages decode to their JSON, and that the JSON encodes to the same bytes. */
final class Golden {
  private Golden() {}

  static void run(JsonObject content) throws InvalidProtocolBufferException {
    String contract = content.get("contract").getAsString();
    for (JsonElement one : content.getAsJsonArray("messages")) {
      JsonObject entry = one.getAsJsonObject();
      String type = entry.get("type").getAsString();
      String wrong = check(entry, Contract.message(type), contract.equals("future"));
      Main.report(contract + ": " + type + ": " + entry.get("name").getAsString(), wrong);
    }
  }

  private static String check(JsonObject entry, Message empty, boolean future) throws InvalidProtocolBufferException {
    byte[] bytes = Base64.getDecoder().decode(entry.get("bytes").getAsString());
    Message message = empty.getParserForType().parseFrom(bytes);
    JsonElement read = Contract.json(message);
    if (!read.equals(entry.get("json"))) {
      return "it decodes to " + read;
    }
    if (!sameBytes(message.toByteArray(), bytes)) {
      return "decoding and encoding changes its bytes";
    }
    boolean written = future || sameBytes(Contract.read(empty, entry.get("json")).toByteArray(), bytes);
    return written ? "" : "it encodes to other bytes";
  }

  /** Whether two messages have the same bytes except for the order of fields, which each language chooses. */
  private static boolean sameBytes(byte[] one, byte[] other) {
    byte[] left = one.clone();
    byte[] right = other.clone();
    Arrays.sort(left);
    Arrays.sort(right);
    return Arrays.equals(left, right);
  }
}
