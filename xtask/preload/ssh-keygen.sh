# needs: ssh-keygen
# A program that closes all descriptors at its start (closefrom) and reads keys with fread.
umask 077
cat > key <<'EOF'
-----BEGIN EC PRIVATE KEY-----
EOF
ssh-keygen -q -t ed25519 -N '' -C test -f made && ssh-keygen -q -t ecdsa -N word -f other
ssh-keygen -y -f made > public && cut -d ' ' -f 1,2 public > p1 && cut -d ' ' -f 1,2 made.pub > p2 && cmp p1 p2 && echo same
echo message > m && ssh-keygen -q -Y sign -f made -n file m 2> /dev/null && echo "me $(cat made.pub)" > allowed
ssh-keygen -Y verify -f allowed -I me -n file -s m.sig < m > verdict 2>&1 && cut -c 1-30 verdict
ssh-keygen -y -P wrong -f other > /dev/null 2>&1 || echo "refused $?"
ssh-keygen -y -f key 2>&1 | cut -c 1-20
