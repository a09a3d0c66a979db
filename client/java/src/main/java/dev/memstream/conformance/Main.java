package dev.memstream.conformance;

import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;

/** Runs the cases and golden messages of tests/conformance with the generated Java. */
public final class Main {
  private static final PrintStream OUT = new PrintStream(System.out, true, StandardCharsets.UTF_8);
  private static final BufferedReader IN =
      new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));

  private Main() {}

  /** Arguments: golden or cases, the server's address, files. */
  public static void main(String[] arguments) throws Exception {
    for (int place = 2; place < arguments.length; place++) {
      JsonObject content = JsonParser.parseString(Files.readString(Path.of(arguments[place]))).getAsJsonObject();
      if (arguments[0].equals("golden")) {
        Golden.run(content);
        continue;
      }
      for (JsonElement one : content.getAsJsonArray("cases")) {
        String wrong = new Case(arguments[1]).run(one.getAsJsonObject().getAsJsonArray("steps"));
        report(one.getAsJsonObject().get("name").getAsString(), wrong);
      }
    }
    System.exit(0);
  }

  static void report(String name, String wrong) {
    JsonObject said = new JsonObject();
    said.addProperty("case", name);
    said.addProperty("wrong", wrong);
    OUT.println(said);
  }

  /** Requests a fault: the server is killed or stopped and restarted, or all connections are cut. */
  static void requestFault(String what) throws IOException {
    JsonObject said = new JsonObject();
    said.addProperty("ask", what);
    OUT.println(said);
    if (IN.readLine() == null) {
      throw new IOException("the test does not answer");
    }
  }
}
