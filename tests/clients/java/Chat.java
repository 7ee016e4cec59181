import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.stream.Collectors;

/** Two chats on one connection of the JDK's client, as it is by default, and then a stream. */
class Chat {
    static final HttpClient client = HttpClient.newHttpClient();

    static HttpRequest request(String url, boolean stream) {
        String body = "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"stream\": " + stream + "}";
        return HttpRequest.newBuilder(URI.create(url + "/chat/completions"))
            .header("Content-Type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(body))
            .build();
    }

    public static void main(String[] arguments) throws Exception {
        for (int i = 0; i < 2; i++) {
            HttpResponse<String> whole =
                client.send(request(arguments[0], false), HttpResponse.BodyHandlers.ofString());
            System.out.println(whole.body());
        }
        System.out.println(
            client.send(request(arguments[0], true), HttpResponse.BodyHandlers.ofLines())
                .body()
                .collect(Collectors.joining("\n")));
    }
}
