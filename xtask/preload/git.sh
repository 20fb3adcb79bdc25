# needs: git
# Operations on a repository: objects, packs, child processes, rewritten refs.
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a
export GIT_COMMITTER_EMAIL=a@b GIT_AUTHOR_DATE='1000000000 +0000' GIT_COMMITTER_DATE='1000000000 +0000'
git init -q -b main work && cd work && git config core.fsmonitor false && git config pack.threads 1 && git config gc.auto 0
for i in 1 2 3 4 5; do
    mkdir -p d$i && seq $((i * 100)) > d$i/f && seq 20000 > big && echo $i >> big && git add -A && git commit -q -m "step $i"
done
git checkout -q -b side HEAD~2 && echo x > new && git add new && git commit -q -m side && git checkout -q main
git merge -q --no-edit side && git log --oneline | cat
git repack -adq && git fsck --full --strict 2>&1 && git diff HEAD~1 --stat | cat
git clone -q --no-local . ../copy && cd ../copy && git config pack.threads 1 && git grep -c 99 | cat
git stash list && git archive HEAD | cksum && git rev-parse HEAD
