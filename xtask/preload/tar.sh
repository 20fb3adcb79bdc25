# needs: tar gzip sha256sum
# Archives of a tree: created, listed and unpacked.
mkdir -p tree/x/y
for i in $(seq 40); do seq $i 900 $((i * 1000 + 9000)) > tree/x/$i; cp tree/x/$i tree/x/y/$i; done
truncate -s 3M tree/hole
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf all.tar tree && sha256sum < all.tar
tar -S --sort=name --mtime=@0 --owner=0 --group=0 -czf all.tgz tree && tar -tzf all.tgz | sort | sha256sum
mkdir out && tar -xzf all.tgz -C out && diff -r tree out/tree && echo same
echo more >> tree/x/3; tar --compare -f all.tar > differences 2>&1 || echo "differs $?"
