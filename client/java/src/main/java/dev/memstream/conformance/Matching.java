package dev.memstream.conformance;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonNull;
import com.google.gson.JsonObject;
import com.google.gson.JsonPrimitive;
import java.util.Map;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** What a case expects of an answer; tests/conformance/matching.py has the rules. */
final class Matching {
  private static final Pattern NAME = Pattern.compile("\\$\\{(\\w+)}");

  private Matching() {}

  /** The value with what was kept in the place of ${name}. */
  static JsonElement filled(JsonElement value, Map<String, String> kept) {
    if (value instanceof JsonArray list) {
      JsonArray made = new JsonArray();
      list.forEach(each -> made.add(filled(each, kept)));
      return made;
    }
    if (value instanceof JsonObject object) {
      if (object.has("repeat")) {
        return new JsonPrimitive(object.get("repeat").getAsString().repeat(object.get("times").getAsInt()));
      }
      JsonObject made = new JsonObject();
      object.entrySet().forEach(one -> made.add(named(one.getKey(), kept), filled(one.getValue(), kept)));
      return made;
    }
    boolean text = value instanceof JsonPrimitive one && one.isString();
    return text ? new JsonPrimitive(named(value.getAsString(), kept)) : value;
  }

  private static String named(String text, Map<String, String> kept) {
    return NAME.matcher(text).replaceAll(found -> Matcher.quoteReplacement(kept.get(found.group(1))));
  }

  /** Fails where an answer is not as expected. */
  static void check(JsonElement expected, JsonElement actual, String where) throws Wrong {
    if (expected instanceof JsonObject object) {
      if (object.size() == 1 && object.has("min")) {
        if (actual == null || actual.getAsDouble() < object.get("min").getAsDouble()) {
          throw new Wrong(where + " is " + actual);
        }
        return;
      }
      if (!(actual instanceof JsonObject fields)) {
        throw new Wrong(where + " is " + actual);
      }
      for (Map.Entry<String, JsonElement> each : object.entrySet()) {
        check(each.getValue(), fields.get(each.getKey()), where + "." + each.getKey());
      }
    } else if (expected instanceof JsonArray list) {
      JsonArray items = actual instanceof JsonArray given ? given : new JsonArray();
      if (items.size() != list.size()) {
        throw new Wrong(where + " has " + items.size() + " items: " + actual);
      }
      for (int place = 0; place < list.size(); place++) {
        check(list.get(place), items.get(place), where + "[" + place + "]");
      }
    } else if (!expected.equals(actual == null ? JsonNull.INSTANCE : actual)) {
      throw new Wrong(where + " is " + actual + ", expected " + expected);
    }
  }

  /** What lies at a dotted path of an answer. */
  static String lies(JsonElement actual, String path) {
    JsonElement at = actual;
    for (String part : path.split("\\.")) {
      at = at.isJsonArray() ? at.getAsJsonArray().get(Integer.parseInt(part)) : at.getAsJsonObject().get(part);
    }
    return at.getAsString();
  }

  /** Something was not as the case says. */
  static final class Wrong extends Exception {
    Wrong(String text) {
      super(text);
    }
  }
}
