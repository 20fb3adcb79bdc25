# needs: python3
# Threads, child processes with close_fds, vectors, mappings, sockets.
export PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE=1
cat > job.py <<'EOF'
import array, concurrent.futures, errno, hashlib, io, mmap, os, shutil, socket, subprocess, sys, threading, zipfile
data = hashlib.sha256(b"seed").digest() * 40000
open("data", "wb").write(data)
def digest(k):
    with open("data", "rb", buffering=[0, 4096, 1 << 20][k % 3]) as f:
        f.seek(k * 1000)
        return hashlib.sha256(f.read(200000 + k)).hexdigest()
with concurrent.futures.ThreadPoolExecutor(6) as pool:
    print(hashlib.sha256("".join(pool.map(digest, range(60))).encode()).hexdigest())
fd = os.open("data", os.O_RDONLY)
parts = [bytearray(n) for n in (1, 4096, 70000, 3)]
print(os.readv(fd, parts), os.preadv(fd, parts, 12345), os.lseek(fd, 0, os.SEEK_CUR), hashlib.md5(b"".join(parts)).hexdigest())
print(os.preadv(fd, parts, 5, os.RWF_HIPRI) if hasattr(os, "RWF_HIPRI") else 0, os.pread(fd, 10, len(data) - 5) == data[-5:])
for call in (lambda: os.read(999, 1), lambda: os.pread(fd, 1, -1), lambda: os.readv(os.open(".", os.O_RDONLY), parts)):
    try:
        call()
    except OSError as e:
        print(errno.errorcode[e.errno])
with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as m:
    print(m.find(data[32:64]), hashlib.md5(m).hexdigest())
for i in range(12):
    done = subprocess.run(["sh", "-c", "cat; ls /proc/self/fd | wc -l >&2"], input=b"x" * 100000, capture_output=True,
                          close_fds=i % 2 == 0, pass_fds=() if i % 3 else (fd,))
    print(done.returncode, len(done.stdout), done.stderr.decode().strip())
a, b = socket.socketpair()
def send():
    a.sendall(data); a.close()
sender = threading.Thread(target=send); sender.start()
got = bytearray()
while True:
    piece = os.read(b.fileno(), 65536)
    if not piece:
        break
    got += piece
sender.join(); print(got == data)
shutil.copyfile("data", "copy"); print(open("copy", "rb").read() == data)
with zipfile.ZipFile("z.zip", "w", zipfile.ZIP_DEFLATED) as z:
    z.write("data")
print(zipfile.ZipFile("z.zip").testzip(), array.array("I", open("data", "rb").read(400))[7])
pid = os.fork()
if pid == 0:
    os.closerange(3, 4096)
    os._exit(len(open("data", "rb").read()) % 251)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
EOF
python3 job.py
