/* Runs a command under a lock: client KEY COMMAND [ARGUMENT ...]; cc -o client client.c */
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
enum { WAIT = 10, LEASE = 30 }; /* seconds */
static const char *host = "localhost", *port = "6388", *key, *renewal = "n";
static char token[33], reply[256], argument[64];
static int server = -1, is_adopted = 1;
static double ends, due;
static double now(void) { /* counts the time in which the host is suspended */
    struct timespec t;
    return clock_gettime(CLOCK_BOOTTIME, &t), t.tv_sec + t.tv_nsec / 1e9;
}
static int fail(const char *what) { return fprintf(stderr, "client: %s\n", what), 1; }
static void close_server(void) { close(server), server = -1; }
/* Whether the server sent a reply, which is then in `reply`, within each of these seconds. */
static int ask(const char *command, const char *words, double patience) {
    struct timeval t = {(int)patience, (int)((patience - (int)patience) * 1e6) + 1};
    char request[512];
    int length = snprintf(request, sizeof request, "%s\n%s\n%s\n", command, key, words), got = 0;
    setsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
    if (send(server, request, length, MSG_NOSIGNAL) != length) return 0;
    for (ssize_t n; got == 0 || reply[got - 1] != '\n'; got += n)
        if ((n = recv(server, reply + got, sizeof reply - 1 - got, 0)) <= 0) return 0;
    return reply[got - 1] = 0, 1;
}
static void connect_server(double patience) {
    struct addrinfo *list = NULL, hints = {.ai_socktype = SOCK_STREAM};
    struct timeval t = {(int)patience, 999999};
    int on = 1, options[][2] = {{TCP_KEEPIDLE, 15}, {TCP_KEEPINTVL, 5}, {TCP_KEEPCNT, 3}};
    if (getaddrinfo(host, port, &hints, &list) != 0) return;
    for (struct addrinfo *a = list; a && server < 0; a = a->ai_next) {
        server = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        setsockopt(server, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof t); /* bounds the connect, too */
        setsockopt(server, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
        for (int i = 0; i < 3; i++)
            setsockopt(server, IPPROTO_TCP, options[i][0], &options[i][1], sizeof(int));
        if (connect(server, a->ai_addr, a->ai_addrlen) != 0) close_server();
    }
    freeaddrinfo(list);
    if (server >= 0) ask("hello", "adopt", patience); /* "error" if it does not know it */
}
/* Renews the lease when it is time. After a failure, adopts the lock over a new connection. */
static int is_held(void) {
    double sent = now(), patience = ends - sent < 1 ? ends - sent : 1;
    if (due <= sent && sent < ends) {
        if (server < 0) renewal = "adopt", connect_server(patience); /* adopt from now on */
        if (server < 0 || !ask(renewal, argument, patience))
            close_server(), is_adopted = 0, due = now() + 0.2;
        else if (strncmp(reply, "ok ", 3) == 0) { /* renew once more after an adoption */
            ends = sent + LEASE - 2, due = sent + is_adopted * LEASE / 3.0, is_adopted = 1;
        } else if (strcmp(reply, "error") == 0) ends = 0; /* lost */
    }
    return now() < ends;
}
int main(int argc, char **argv) {
    const char *last = getenv("LAST_FENCE");
    if (argc < 3 || strlen(argv[1]) > 256) return fail("usage: client KEY COMMAND ...");
    key = argv[1], connect_server(5), snprintf(argument, sizeof argument, "%d %d", WAIT, LEASE);
    if (server < 0 || !ask("l", argument, WAIT + 5)) return fail("no answer");
    if (sscanf(reply, "ok %32s", token) != 1) return fail(reply);
    ends = now() + LEASE - 2, due = 0; /* renews at once: the wait is not counted */
    if (last && strncmp(token, last, 16) < 0) return fail("outdated"); /* compare as text */
    snprintf(argument, sizeof argument, "%s %d", token, LEASE), setenv("TOKEN", token, 1);
    int status, child = fork();
    if (child < 0) return fail("fork");
    if (child == 0) execvp(argv[2], argv + 2), _exit(127);
    while (waitpid(child, &status, WNOHANG) == 0) is_held() ? usleep(100000) : kill(child, SIGKILL);
    while (is_held() && server < 0) usleep(100000);
    if (!is_held() || !ask("r", token, 5) || strcmp(reply, "ok") != 0) return fail("lost");
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}
