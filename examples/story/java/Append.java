import dev.memstream.v1.AppendMessageRequest;
import dev.memstream.v1.CompleteConversationRequest;
import dev.memstream.v1.ConversationMessage;
import dev.memstream.v1.ConversationServiceGrpc;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;

/** Appends each message of a conversation once, however often this runs, and completes the conversation. */
public final class Append {
  private static final String[][] TALK = {
    {"Bob", "Joy", "I moved from Ulm to Lisbon in March."},
    {"Joy", "Bob", "How do you like it there?"},
    {"Bob", "Joy", "The trams are lovely, but Lena, who teaches me the cello, stayed."},
    {"Joy", "Bob", "Then play for her on the phone!"},
  };

  public static void main(String[] arguments) {
    String target = arguments.length > 0 ? arguments[0] : "127.0.0.1:7700";
    ManagedChannel channel = ManagedChannelBuilder.forTarget(target).usePlaintext().build();
    try {
      var conversations = ConversationServiceGrpc.newBlockingStub(channel);
      for (int place = 0; place < TALK.length; place++) {
        var message = ConversationMessage.newBuilder()
            .setConversation("monday")
            .setSender(TALK[place][0])
            .setReceiver(TALK[place][1])
            .setContent(TALK[place][2]);
        var appended = conversations.appendMessage(AppendMessageRequest.newBuilder()
            .setNamespace("story")
            .setMessage(message)
            .setRequestId("monday-" + place) // a repeated request gets the same answer and appends nothing
            .build());
        System.out.println(appended.getMessage().getNumber() + " " + TALK[place][2]);
      }
      conversations.completeConversation(CompleteConversationRequest.newBuilder()
          .setNamespace("story")
          .setConversation("monday")
          .build());
    } finally {
      channel.shutdownNow();
    }
  }
}
