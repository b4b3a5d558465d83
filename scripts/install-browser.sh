#!/bin/sh
# Installs Chromium and Playwright for the tests of the web page (scripts/test-page.py).
set -eu
apt-get update -q
apt-get install -y -q chromium
pip install -q playwright
