package dev.memstream.conformance;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonNull;
import com.google.gson.JsonObject;
import com.google.gson.JsonPrimitive;
import java.util.Map;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** Compares an answer with what a case expects; tests/conformance/matching.py has the rules. */
final class Matching {
  private static final Pattern NAME = Pattern.compile("\\$\\{(\\w+)}");

  private Matching() {}

  /** Replaces each ${name} in a value by the kept text. */
  static JsonElement fillPlaceholders(JsonElement value, Map<String, String> kept) {
    if (value instanceof JsonArray list) {
      JsonArray made = new JsonArray();
      list.forEach(each -> made.add(fillPlaceholders(each, kept)));
      return made;
    }
    if (value instanceof JsonObject object) {
      if (object.has("repeat")) {
        return new JsonPrimitive(object.get("repeat").getAsString().repeat(object.get("times").getAsInt()));
      }
      JsonObject made = new JsonObject();
      object.entrySet().forEach(one -> made.add(fillText(one.getKey(), kept), fillPlaceholders(one.getValue(), kept)));
      return made;
    }
    boolean text = value instanceof JsonPrimitive one && one.isString();
    return text ? new JsonPrimitive(fillText(value.getAsString(), kept)) : value;
  }

  private static String fillText(String text, Map<String, String> kept) {
    return NAME.matcher(text).replaceAll(found -> Matcher.quoteReplacement(kept.get(found.group(1))));
  }

  /** Throws if an answer is not as expected. */
  static void check(JsonElement expected, JsonElement actual, String where) throws Mismatch {
    if (expected instanceof JsonObject object) {
      if (object.size() == 1 && object.has("min")) {
        if (actual == null || actual.getAsDouble() < object.get("min").getAsDouble()) {
          throw new Mismatch(where + " is " + actual);
        }
        return;
      }
      if (!(actual instanceof JsonObject fields)) {
        throw new Mismatch(where + " is " + actual);
      }
      for (Map.Entry<String, JsonElement> each : object.entrySet()) {
        check(each.getValue(), fields.get(each.getKey()), where + "." + each.getKey());
      }
    } else if (expected instanceof JsonArray list) {
      JsonArray items = actual instanceof JsonArray given ? given : new JsonArray();
      if (items.size() != list.size()) {
        throw new Mismatch(where + " has " + items.size() + " items: " + actual);
      }
      for (int place = 0; place < list.size(); place++) {
        check(list.get(place), items.get(place), where + "[" + place + "]");
      }
    } else if (!expected.equals(actual == null ? JsonNull.INSTANCE : actual)) {
      throw new Mismatch(where + " is " + actual + ", expected " + expected);
    }
  }

  /** Returns the value at a dotted path of an answer. */
  static String valueAt(JsonElement actual, String path) {
    JsonElement at = actual;
    for (String part : path.split("\\.")) {
      at = at.isJsonArray() ? at.getAsJsonArray().get(Integer.parseInt(part)) : at.getAsJsonObject().get(part);
    }
    return at.getAsString();
  }

  /** A result differs from what the case expects. */
  static final class Mismatch extends Exception {
    Mismatch(String text) {
      super(text);
    }
  }
}
