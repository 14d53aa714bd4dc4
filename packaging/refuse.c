/* Runs a command without pidfds, inotify and getrandom, as on old and on emulated kernels:
 * refuse COMMAND [ARGUMENT ...] */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REFUSE(call) \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1), \
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS)

int main(int argc, char **argv) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        REFUSE(SYS_pidfd_open),
        REFUSE(SYS_pidfd_send_signal),
#ifdef SYS_inotify_init
        REFUSE(SYS_inotify_init),
#endif
        REFUSE(SYS_inotify_init1),
        REFUSE(SYS_getrandom),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    if (argc < 2) return 64;
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) {
        perror("refuse");
        return 71;
    }
    execvp(argv[1], argv + 1);
    perror(argv[1]);
    return 127;
}
