"""What compilers, runtimes, debuggers and services of the workshop (`workshop.py`) see of themselves: probes as in
`probes.py`."""

from __future__ import annotations

from tests.fidelity.workflows import BUILDS, DEBUGGERS, SSHD, WAIT, WORK

JAVA = """cat > A.java <<'END'
import java.lang.management.*;
public class A {
  static volatile byte[][] kept = new byte[64][];
  public static void main(String[] a) throws Exception {
    Runtime r = Runtime.getRuntime();
    System.out.println(r.availableProcessors() + " " + (r.maxMemory() >> 20) + " " + java.util.concurrent.ForkJoinPool.commonPool().getParallelism());
    var os = (com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
    System.out.println((os.getTotalMemorySize() >> 20) + " " + os.getAvailableProcessors() + " " + (os.getFreeMemorySize() > 0) + " " + (os.getCpuLoad() >= -1));
    System.out.println(java.net.InetAddress.getByName("localhost").isLoopbackAddress());
    for (int i = 0; i < 2000; i++) kept[i % 64] = new byte[1 << 20];
    Thread[] t = new Thread[50];
    for (int i = 0; i < t.length; i++) { t[i] = new Thread(() -> {}, "t" + i); t[i].start(); }
    for (Thread each : t) each.join();
    Process p = new ProcessBuilder("echo", "started").inheritIO().start(); p.waitFor();
    System.out.println(ProcessHandle.current().children().count() + " " + System.getProperty("user.name") + " " + System.getProperty("java.io.tmpdir"));
  }
}
END
"""
GO = """cat > m.go <<'END'
package main
import ("fmt"; "net"; "os"; "os/exec"; "os/user"; "runtime"; "runtime/debug"; "sync")
func main() {
	var all sync.WaitGroup; var lock sync.Mutex; sum := 0
	for i := range 1000 { all.Add(1); go func() { defer all.Done(); lock.Lock(); sum += i; lock.Unlock() }() }
	all.Wait()
	me, err := user.Current(); host, _ := os.Hostname(); out, _ := exec.Command("echo", "started").Output()
	names, _ := net.LookupHost("localhost"); _, unknown := net.LookupHost("no.such.name.invalid"); debug.SetMemoryLimit(1 << 28)
	fmt.Println(sum, runtime.NumCPU(), me.Username, err, host, string(out), names, unknown != nil)
	l, err := net.Listen("tcp", "localhost:0"); fmt.Println(err); go l.Accept(); _, err = net.Dial("tcp", l.Addr().String()); fmt.Println(err)
}
END
GOFLAGS=-mod=mod GO111MODULE=off GOCACHE=/tmp/go CGO_ENABLED=0 go build -o m m.go
"""
DOTNET = """cat > a.cs <<'END'
class A { static void Main() {
  System.Console.WriteLine(System.Environment.ProcessorCount + " " + (System.GC.GetGCMemoryInfo().TotalAvailableMemoryBytes >> 20));
  var t = new System.Threading.Thread(() => System.Console.WriteLine(System.Environment.MachineName)); t.Start(); t.Join();
  long n = 0; for (int i = 0; i < 3000; i++) n += new byte[1 << 20].Length;
  System.Console.WriteLine(n >> 20);
} }
END
framework=$(ls -d /opt/dotnet/shared/Microsoft.NETCore.App/*)
mcs -nologo -nostdlib -noconfig $(for n in System.Private.CoreLib System.Runtime System.Console; do echo -r:$framework/$n.dll; done) a.cs -out:a.dll
cat > a.runtimeconfig.json <<'END'
{"runtimeOptions": {"framework": {"name": "Microsoft.NETCore.App", "version": "3.1.0"}, "configProperties": {"System.Globalization.Invariant": true}}}
END
"""


def lines(script: str) -> str:
    """How many lines a script prints, where they have addresses and process ids in them."""
    return f"{{ {script}; }} 2> /dev/null | wc -l"


NODE = "const os = require('os'), v8 = require('v8');"
_TOOLS = {
    "JVM: processors, heap, names, threads, a process": f"{JAVA} java A.java",
    "JVM: what it makes of the container": "java -XshowSettings:system -version 2>&1 | grep -A30 'Operating System Metrics' | grep -vE 'CPU Period|CPU Quota|Effective CPU|List of|Slots|openjdk|OpenJDK'",
    "JVM: heap and collector": "java -XX:+PrintFlagsFinal -version 2> /dev/null | grep -E ' (MaxHeapSize|InitialHeapSize|UseSerialGC|UseG1GC|UseContainerSupport|ParallelGCThreads|CICompilerCount) ' | awk '{print $2, $4}'",
    "JVM: attached to": "echo 'class A { public static void main(String[] a) throws Exception { Thread.sleep(20000); } }' > A.java; java A.java & wait_for sh -c \"jstack $! | grep -q main\"; jcmd $! VM.command_line | grep -c java_command; jps | grep -c Main; kill $!",
    "JVM: perf counters and huge pages": "java -XX:+UsePerfData -XX:+UseTransparentHugePages -XX:+UseNUMA -version > /dev/null 2>&1; echo $?",
    "Go: goroutines, processors, user, names": f"{GO} ./m",
    "Go: GOMAXPROCS": "printf 'package main\\nimport \"runtime\"\\nfunc main() { println(runtime.GOMAXPROCS(0)) }\\n' > m.go; GO111MODULE=off GOCACHE=/tmp/go go build -o m m.go; ./m; env -u GOMAXPROCS ./m",
    "OpenMP: threads": "printf '#include <omp.h>\\n#include <stdio.h>\\nint main(void) { printf(\"%%d %%d\\\\n\", omp_get_max_threads(), omp_get_num_procs()); }\\n' > a.c; gcc -fopenmp -o a a.c; ./a; env -u OMP_NUM_THREADS ./a",
    "Node: processors and parallelism": f'node -e "{NODE} console.log(os.cpus().length, os.availableParallelism(), os.hostname(), os.userInfo().username)"',
    "Node: memory": f'node -e "{NODE} console.log(process.constrainedMemory() >> 20, v8.getHeapStatistics().heap_size_limit >> 20)"',
    "Node: workers, processes, names": "node -e \"const {Worker} = require('worker_threads'); new Worker('process.exit(3)', {eval: true}).on('exit', c => console.log(c, require('child_process').execSync('echo started') + '')); require('dns').lookup('localhost', (e, a) => console.log(a))\"",
    "Node: files are watched": "node -e \"const fs = require('fs'); const w = fs.watch('.', () => { console.log('seen'); w.close() }); fs.writeFileSync('a', '')\"",
    ".NET: processors, memory, names, a heap that fits": f"{DOTNET} /opt/dotnet/dotnet exec a.dll",
    "Mono: processors": "echo 'class A { static void Main() { System.Console.WriteLine(System.Environment.ProcessorCount); } }' > a.cs; mcs a.cs; mono a.exe",
    "Ruby: processors": "ruby -retc -e 'p Etc.nprocessors, Process.uid'",
    "Rust: parallelism": 'echo \'fn main() { println!("{:?}", std::thread::available_parallelism()); std::thread::Builder::new().name("n".into()).spawn(|| ()).unwrap().join().unwrap(); }\' > a.rs; rustc a.rs; ./a',
    "R: cores": "Rscript -e 'cat(parallel::detectCores(), unlist(parallel::mclapply(1:3, function(x) x * 2, mc.cores = 2)))'",
    "hwloc": "lstopo-no-graphics --of console --no-io 2>&1 | grep -oE '(Machine|Package|NUMANode|Core|PU)' | sort | uniq -c",
    "MPI: where ranks run": "mpirun --allow-run-as-root --oversubscribe -n 2 hostname 2>&1",
    "MPI: messages of megabytes": """
printf '#include <mpi.h>\\n#include <stdio.h>\\nstatic char b[4 << 20];\\nint main(int c, char **v) { int r; MPI_Init(&c, &v); MPI_Comm_rank(MPI_COMM_WORLD, &r); if (r) b[99] = 7, MPI_Send(b, sizeof b, MPI_CHAR, 0, 0, MPI_COMM_WORLD); else MPI_Recv(b, sizeof b, MPI_CHAR, 1, 0, MPI_COMM_WORLD, 0), printf("%%d\\\\n", b[99]); MPI_Finalize(); }\\n' > a.c
mpicc -o a a.c; mpirun --allow-run-as-root --oversubscribe -n 2 ./a 2>&1""",
    "gdb: a value is written, and a function called": f"{{ {DEBUGGERS['gdb']}; }} > /dev/null 2>&1; grep -E '^.[0-9] = 42' log",
    "gdbserver: a breakpoint": (
        "printf 'int f(int a) { return a; }\\nint main(void) { return f(7); }\\n' > a.c; gcc -g -o a a.c; gdbserver --once localhost:2345 ./a > log "
        "2>&1 & wait_for grep Listening log; "
        "gdb -nx -batch -ex 'target remote localhost:2345' -ex 'break f' -ex continue -ex 'print a' -ex kill ./a 2>&1 | grep -c '= 7'"
    ),
    "gdb: attached": lines(DEBUGGERS["gdb, attached"]),
    "gdb: threads": "printf '#include <pthread.h>\\n#include <unistd.h>\\nvoid *f(void *a) { sleep(9); return a; }\\nint main(void) { pthread_t t; pthread_create(&t, 0, f, 0); pthread_setname_np(t, \"named\"); pthread_join(t, 0); }\\n' > a.c; gcc -g -D_GNU_SOURCE -o a a.c; gdb -nx -batch -ex 'break sleep' -ex run -ex 'info threads' -ex kill ./a 2>&1 | grep -cE '^[* ] [12] '",
    "gcore": lines(DEBUGGERS["a core file, by gcore"]),
    "strace: calls": "strace -f -o t sh -c 'cat /etc/passwd > /dev/null; /bin/true'; grep -cE 'execve\\(' t; strace -e inject=openat:error=EACCES cat /etc/passwd 2>&1 | grep -o -m1 INJECTED",
    "ltrace": lines(DEBUGGERS["ltrace"]),
    "perf is refused": "perf record true > log 2>&1; [ $? -ne 0 ] && echo refused",
    "ssh: a login": f"{SSHD}ssh localhost 'id -un; pwd; tty; echo $SHELL'; ssh -tt localhost 'tty | cut -c-9; stty size' 2> /dev/null | tr -d '\\r'",
    "git over ssh": lines(WORK["git over ssh"]),
    "ping": "ping -c 1 -W 2 127.0.0.1 2>&1 | grep -c '1 received'; ping -c 1 -W 2 localhost 2>&1 | grep -c '1 received'",
    "ping as a user": "setpriv --reuid 1000 --regid 1000 --clear-groups ping -c 1 -W 2 127.0.0.1 2>&1 | grep -c '1 received'",
    "DNS": "host -W 1 a.invalid 2>&1 | grep -cE 'no servers|unreachable|refused|not found'",
    "tmux": WORK["tmux"],
    "screen": lines(WORK["screen"]),
    "cron": WORK["cron"],
    "sanitizers": lines(DEBUGGERS["sanitizers"]),
    "Valgrind": lines(DEBUGGERS["Valgrind"]),
    "MPI: a sum": BUILDS["MPI"],
    "Chromium": "chromium --headless --no-sandbox --disable-gpu --dump-dom 'data:text/html,<script>document.write(navigator.hardwareConcurrency)</script>' 2> log",
    "systemd": "systemctl is-system-running 2>&1 | head -1",
    "mount of FUSE": "[ -e /dev/fuse ] && echo there",
    "top": "top -bn1 | sed -n '7p'",
    "lsof": "sleep 30 > held & lsof -w held | grep -c sleep; kill $!",
    "ss": "python3 -m http.server 8000 > log 2>&1 & wait_for sh -c 'ss -ltn | grep -q 8000'; ss -ltnp | grep -c python3; kill $!",
    "ip": "ip -br link | awk '{print $1}'; ip -br addr show lo | awk '{print $3}'",
}
TOOLS = {f"tools: {name}": f"{WAIT}\n{command}" for name, command in _TOOLS.items()}
