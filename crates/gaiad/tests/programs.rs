//! Real programs print the same in a mount and in an ordinary directory, and leave the same files.

mod common;

use std::path::Path;
use std::process::Command;

use common::TestMount;
use common::both::tree;

#[test]
fn server_role() {
    common::server_role();
}

fn run(dir: &Path, script: &str) -> String {
    let mut command = Command::new("timeout");
    command.args(["100", "sh", "-euc", script]).current_dir(dir);
    // Nothing of the user's own.
    for (name, value) in [("HOME", "/nonexistent"), ("LC_ALL", "C"), ("TZ", "UTC"), ("GIT_CONFIG_NOSYSTEM", "1")] {
        command.env(name, value);
    }
    for role in ["AUTHOR", "COMMITTER"] {
        command.env(format!("GIT_{role}_NAME"), "n").env(format!("GIT_{role}_EMAIL"), "e@example.org");
        command.env(format!("GIT_{role}_DATE"), "2020-01-02T03:04:05Z");
    }
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let place = dir.display().to_string();
    format!("{}\n{}\n{}", output.status, text(&output.stdout), text(&output.stderr)).replace(&place, "DIR")
}

/// Runs a script that needs these programs on both sides, with and without servers that are killed.
fn compare(programs: &[&str], script: &str) {
    for program in programs {
        let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output().unwrap();
        if !found.status.success() {
            eprintln!("skipped: no {program}");
            return;
        }
    }
    for kill in [false, true] {
        let Some(mount) = TestMount::new(|_| ()) else { return };
        let expected = run(&mount.reference, script);
        assert!(expected.starts_with("exit status: 0"), "{expected}");
        let killer = kill.then(|| mount.killer(5, 5..60));
        let got = run(&mount.dir, script);
        drop(killer);
        assert_eq!(got, expected, "servers killed: {kill}");
        let trees = (tree(&mount.dir), tree(&mount.reference));
        assert_eq!(trees.0, trees.1, "servers killed: {kill}");
        let (below, _root) = mount.unmount();
        assert_eq!(tree(&below), trees.1, "after unmount, servers killed: {kill}");
    }
}

#[test]
fn sqlite_in_write_ahead_mode() {
    compare(
        &["sqlite3"],
        "sqlite3 db 'PRAGMA journal_mode=WAL; PRAGMA mmap_size=100000000; CREATE TABLE t(a INTEGER PRIMARY KEY, b);'
         writer() { i=0; while [ $i -lt 40 ]; do
             sqlite3 -cmd '.timeout 60000' db \"INSERT INTO t(b) VALUES(hex(zeroblob(700)) || $1);\" >/dev/null; i=$((i+1))
         done; }
         writer 1 & one=$!; writer 2 & two=$!
         sqlite3 -cmd '.timeout 60000' db 'BEGIN IMMEDIATE; WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n
             WHERE i < 20000) INSERT INTO t(b) SELECT i FROM n; ROLLBACK;'
         wait $one; wait $two
         sqlite3 db 'SELECT count(*), sum(length(b)) FROM t; PRAGMA integrity_check; PRAGMA wal_checkpoint(TRUNCATE);
             PRAGMA journal_mode=DELETE;'
         sqlite3 db 'SELECT b FROM t ORDER BY b;' | cksum; rm db",
    );
}

#[test]
fn git_commits_branches_and_clones() {
    compare(
        &["git"],
        "git init -q -b main one; cd one
         i=0; while [ $i -lt 60 ]; do mkdir -p d$((i%7)); seq $i $((i+300)) >d$((i%7))/f$i; i=$((i+1)); done
         ln -s d0 link; chmod +x d0/f0; git add .; git commit -qm first; git status --short
         git checkout -q -b side; seq 5 >d1/f1; git mv d2 moved; git commit -qam second
         git checkout -q main; seq 9 >d3/f3; git commit -qam third; git merge -q -m merged side
         git gc -q; git fsck --strict; git log --oneline --stat; cd ..
         git clone -q --no-hardlinks one two; git -C two status --short; git -C two rev-parse HEAD
         rm -r one/.git two/.git",
    );
}

#[test]
fn tar_with_holes_links_and_attributes() {
    compare(
        &["tar", "truncate"],
        "mkdir in out; cd in; truncate -s 30M sparse; echo data | dd of=sparse bs=1M seek=17 conv=notrunc status=none
         seq 100000 >file; ln file hard; ln -s file soft; mkfifo pipe; mkdir -p a/b/c; touch -d 2001-02-03 a/b; chmod 1751 a
         exec 9>open; seq 100000 >&9; tar -S --xattrs --acls -cf ../t.tar .; exec 9>&-; cd ../out
         tar --xattrs -S -xpf ../t.tar; tar -df ../t.tar; stat -c '%n %a %h' a/b a file hard; stat -c %Y a/b
         du -k --apparent-size sparse; [ $(du -k sparse | cut -f1) -lt 100 ] && echo sparse; cksum open sparse
         cp -a . ../copy; cd ../copy; [ $(du -k sparse | cut -f1) -lt 100 ] && echo copy is sparse; cksum open sparse
         cd ..; rm -r in t.tar",
    );
}

#[test]
fn compiler_makes_a_program_that_runs() {
    compare(
        &["cc", "ar"],
        "echo 'int f(void) { return 41; }' >f.c
         echo 'int puts(const char *); int f(void); int main(void) { return puts(f() == 41 ? \"yes\" : \"no\") < 0; }' >main.c
         cc -g -O -c f.c main.c; ar rcs libf.a f.o; cc -o program main.o libf.a; ./program; cp program copy; ./copy
         cc -shared -fPIC -o libf.so f.c; cc -o dynamic main.c -L. -lf; LD_LIBRARY_PATH=. ./dynamic
         strip copy; ./copy; rm *.o *.a *.so program copy dynamic",
    );
}

#[test]
fn python_maps_locks_and_copies_files() {
    compare(
        &["python3"],
        "python3 - <<'END'
import fcntl, mmap, os, shutil, subprocess, sys
with open('file', 'w+b') as f:
    f.truncate(100000)
    m = mmap.mmap(f.fileno(), 0)
    m[5:9] = b'maps'; f.seek(50000); f.write(b'write'); f.flush(); assert m[50000:50005] == b'write'
    m.resize(200000); m[199999] = 7; m.flush(); m.close()
    fcntl.lockf(f, fcntl.LOCK_EX)
    code = 'import fcntl,sys\\ntry: fcntl.lockf(open(\"file\",\"r+b\"), fcntl.LOCK_EX | fcntl.LOCK_NB)\\nexcept OSError as e: print(e)'
    print(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout)
    print(os.pread(f.fileno(), 4, 5), os.fstat(f.fileno()).st_size)
src, to = os.open('file', os.O_RDONLY), os.open('ranges', os.O_RDWR | os.O_CREAT)
at = 0
while n := os.copy_file_range(src, to, 77777, at, at): at += n
print(at, open('file', 'rb').read() == open('ranges', 'rb').read())
shutil.copyfile('file', 'sendfile'); os.posix_fallocate(to, 300000, 10000); print(os.fstat(to).st_size)
os.setxattr('file', 'user.name', b'value'); shutil.copy2('file', 'copy'); print(os.getxattr('copy', 'user.name'))
os.rename('copy', 'sendfile'); print(sorted(os.listdir()), os.statvfs('.').f_namemax)
END",
    );
}

#[test]
fn rsync_copies_updates_and_checks_trees() {
    compare(
        &["rsync", "truncate"],
        "mkdir -p in/a/b; i=0; while [ $i -lt 40 ]; do seq $i $((i*97)) >in/a/f$i; i=$((i+1)); done
         truncate -s 3M in/sparse; echo data | dd of=in/sparse bs=1M seek=2 conv=notrunc status=none
         seq 200000 >in/large; ln in/large in/hard; ln -s a in/soft; chmod 4751 in/a/f1; touch -d 2001-02-03 in/a in/a/f2
         rsync -aHAXS in/ out; rsync -aHAXSni --checksum in/ out; [ $(du -k out/sparse | cut -f1) -lt 100 ] && echo sparse
         seq 100 >>in/a/f3; rm in/a/f4; mv in/a/f5 in/a/b/; dd if=in/large of=in/large bs=1 count=9 seek=70000 conv=notrunc status=none
         rsync -aHAX --checksum --inplace --no-whole-file --delete in/ out; rsync -aHAXni --checksum --delete in/ out; cksum out/hard
         rsync -aHAX --checksum --delay-updates --link-dest=$PWD/out in/ third; stat -c '%h %a' third/large third/a/f1; rm -r in third",
    );
}

#[test]
fn fio_reads_back_what_it_wrote() {
    compare(
        &["fio"],
        "verify() { fio --name=$1 --ioengine=$* --size=6M --bsrange=4k-64k --rw=randwrite --verify=crc32c --verify_fatal=1 \\
             --randrepeat=1 --end_fsync=1 --fallocate=none >log 2>&1 || { cat log; exit 1; }; echo $*; }
         verify sync; verify sync --direct=1 --rw=randrw; verify mmap --fsync=50; verify psync --overwrite=1 --numjobs=2
         [ $(cat /proc/sys/kernel/io_uring_disabled 2>/dev/null || echo 2) != 0 ] ||
             for direct in 0 1; do verify io_uring --iodepth=16 --direct=$direct --blockalign=4k; done
         rm -f log *.0 *-verify.state *.[0-9].[0-9]",
    );
}

#[test]
fn stressors_of_files_find_nothing() {
    compare(
        &["stress-ng"],
        "stress() { stress-ng --quiet --verify --temp-path . --timeout 20 --seed 7 \"$@\"; echo $? $1; }
         stress --hdd 2 --hdd-ops 1000 --hdd-bytes 3M --hdd-opts wr-rnd,rd-rnd,fsync
         stress --hdd 1 --hdd-ops 200 --hdd-bytes 3M --hdd-opts direct,wr-seq,rd-seq
         stress --mmap 1 --mmap-ops 2 --mmap-bytes 2M --mmap-file --mmap-async
         stress --aio 1 --aio-ops 200; stress --aiol 1 --aiol-ops 200; stress --iomix 1 --iomix-ops 60 --iomix-bytes 3M
         stress --fallocate 1 --fallocate-ops 6 --fallocate-bytes 3M; stress --seek 1 --seek-ops 50 --seek-size 3M
         stress --copy-file 1 --copy-file-ops 15 --copy-file-bytes 128M; stress --sync-file 1 --sync-file-ops 3 --sync-file-bytes 3M
         stress --rename 2 --rename-ops 200; stress --dentry 1 --dentry-ops 200 --dentries 50; stress --dir 1 --dir-ops 200
         stress --xattr 1 --xattr-ops 2
         stress --flock 2 --flock-ops 2000; stress --lockf 2 --lockf-ops 500; stress --utime 1 --utime-ops 200
         stress --sendfile 1 --sendfile-ops 30 --sendfile-size 1M; stress --readahead 1 --readahead-ops 20 --readahead-bytes 3M
         stress --msync 1 --msync-ops 30 --msync-bytes 1M; stress --chmod 1 --chmod-ops 30",
    );
}
