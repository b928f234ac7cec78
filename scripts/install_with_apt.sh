#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# usage: install_with_apt.sh <apt package>...
#
# Installs packages. Fails if there is no apt, or if it would need a password.
set -eu

if ! command -v apt-get > /dev/null; then
  exit 1
elif [ "$(id -u)" = 0 ]; then
  as_root=env
elif sudo -n true 2> /dev/null; then
  as_root="sudo -n"
else
  exit 1
fi

echo "Installing $* with apt-get"
$as_root apt-get update -qq
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" > /dev/null
