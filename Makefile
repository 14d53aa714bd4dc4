# Installs the four programs, their manual pages, completions and examples:
#
#     make && sudo make install
#     make install PREFIX=$HOME/.local
#     make install PREFIX=/usr DESTDIR=/tmp/package
#
# `make uninstall` with the same PREFIX and DESTDIR removes the same files.

PREFIX = /usr/local
DESTDIR =
CARGO = cargo
# Beside the default ones: tls, cluster.
FEATURES =
# The directory of the built programs. It is named to cargo, too: sudo drops CARGO_TARGET_DIR.
BUILT = target/release

to = $(DESTDIR)$(PREFIX)
share = $(to)/share
bash = $(share)/bash-completion/completions
zsh = $(share)/zsh/site-functions
fish = $(share)/fish/vendor_completions.d
doc = $(share)/doc/latchd
documents = LICENSE-APACHE LICENSE-MIT README.md
# Examples in Rust stay with the sources. Each names the programs below PREFIX once installed.
examples = `find examples -name bench -prune -o -type f ! -name '*.rs' -print`

# The paths of the registry are in the programs, which are the same wherever that is.
REMAP = --remap-path-prefix=$${CARGO_HOME:-$$HOME/.cargo}=/cargo

all:
	RUSTFLAGS="$(REMAP) $$RUSTFLAGS" $(CARGO) build --release --locked --bins \
	    --features "$(FEATURES)" --target-dir target

install:
	install -d "$(to)/bin" "$(to)/sbin" "$(bash)" "$(zsh)" "$(fish)" "$(doc)"
	install "$(BUILT)/latch" "$(BUILT)/sema" "$(to)/bin"
	install "$(BUILT)/latchd" "$(BUILT)/lfpd" "$(to)/sbin"
	for section in 1 5 7 8; do \
	    install -d "$(share)/man/man$$section" && \
	    install -m 644 man/*.$$section "$(share)/man/man$$section" || exit; \
	done
	for program in latchd latch sema lfpd; do \
	    install -m 644 completions/$$program.bash "$(bash)/$$program" || exit; \
	done
	install -m 644 completions/_* "$(zsh)"
	install -m 644 completions/*.fish "$(fish)"
	install -m 644 $(documents) "$(doc)"
	for file in $(examples); do \
	    mode=644; [ ! -x "$$file" ] || mode=755; \
	    install -d "$(doc)/$${file%/*}" && \
	    sed 's#/usr/sbin/\(latchd\|lfpd\)#$(PREFIX)/sbin/\1#' "$$file" | \
	        install -m $$mode /dev/stdin "$(doc)/$$file" || exit; \
	done

uninstall:
	rm -f "$(to)/bin/latch" "$(to)/bin/sema" "$(to)/sbin/latchd" "$(to)/sbin/lfpd"
	for page in man/*.[1578]; do \
	    rm -f "$(share)/man/man$${page##*.}/$${page##*/}" || exit; \
	done
	for program in latchd latch sema lfpd; do \
	    rm -f "$(bash)/$$program" "$(zsh)/_$$program" "$(fish)/$$program.fish" || exit; \
	done
	for file in $(documents) $(examples); do rm -f "$(doc)/$$file" || exit; done
	for folder in /examples/cluster /examples ""; do \
	    [ ! -d "$(doc)$$folder" ] || \
	        rmdir --ignore-fail-on-non-empty "$(doc)$$folder" || exit; \
	done

.PHONY: all install uninstall
