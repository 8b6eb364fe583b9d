/* hold PROGRAM ARGUMENTS...: become PROGRAM with SIGTERM and SIGINT blocked.
 *
 * The kernel drops signals for which PID 1 has no handler, so a container that is stopped while its server still starts
 * would run on until it is killed. Blocked, the signals wait for the server's init (atropos/sandbox/boot/init.py). In C,
 * since Python takes a while until it could say so.
 */
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    sigset_t held;

    sigemptyset(&held);
    sigaddset(&held, SIGTERM);
    sigaddset(&held, SIGINT);
    sigprocmask(SIG_BLOCK, &held, NULL);
    if (argc > 1)
        execvp(argv[1], argv + 1);
    perror("hold");
    return 2;
}
