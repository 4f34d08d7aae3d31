#!/usr/bin/env bash
# Make the certificates of the tests, valid from 2000 to 2099, except expired.pem and future.pem. The keys protect nothing.
#   bash tests/data/tls/make.sh    writes NAME.pem and NAME.key beside this script
set -euo pipefail
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# issue NAME CA [ALTERNATIVE_NAMES [START END]]: the certificate NAME, signed by CA, or by itself if that is its name.
issue() {
  local name=$1 ca=$2 alternatives=${3:-} start=${4:-20000101000000Z} end=${5:-20991231000000Z} signer=()
  openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$name.key" 2>/dev/null
  openssl req -new -key "$name.key" -subj "/CN=prelunet test $name" -out "$work/$name.csr"
  if [ "$name" = "$ca" ]; then signer=(-selfsign -keyfile "$name.key"); else signer=(-cert "$ca.pem" -keyfile "$ca.key"); fi
  if [ -n "$alternatives" ]; then
    printf 'subjectAltName = %s\nauthorityKeyIdentifier = keyid\n' "$alternatives" >"$work/extensions"
  else
    printf 'basicConstraints = critical, CA:TRUE\nkeyUsage = critical, keyCertSign\nsubjectKeyIdentifier = hash\n' >"$work/extensions"
  fi
  : >"$work/index"
  printf '[ca]\ndefault_ca = a\n[a]\ndatabase = %s\nnew_certs_dir = %s\nrand_serial = yes\npolicy = p\ndefault_md = sha256\n[p]\ncommonName = supplied\n' \
    "$work/index" "$work" >"$work/config"
  openssl ca -batch -notext -config "$work/config" "${signer[@]}" -in "$work/$name.csr" -out "$name.pem" \
    -startdate "$start" -enddate "$end" -extfile "$work/extensions" 2>/dev/null
}

issue ca ca
issue other-ca other-ca
issue server ca DNS:localhost,IP:127.0.0.1
issue server-2 ca DNS:localhost,IP:127.0.0.1
issue expired ca DNS:localhost,IP:127.0.0.1 20000101000000Z 20101231000000Z
issue future ca DNS:localhost,IP:127.0.0.1 20980101000000Z
issue other-host ca DNS:example.org
issue self-signed self-signed DNS:localhost,IP:127.0.0.1
issue client ca DNS:client
issue other-client other-ca DNS:client
# An authority without key usage, as this command makes them; a strict check requires it.
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout plain-ca.key -out plain-ca.pem -days 27000 \
  -subj "/CN=prelunet test plain-ca" 2>/dev/null
issue plain-client plain-ca DNS:client
openssl req -x509 -newkey ed25519 -nodes -keyout ed25519.key -out ed25519.pem -days 27000 -subj /CN=localhost 2>/dev/null
openssl pkey -in server.key -aes256 -passout pass:secret -out encrypted.key
