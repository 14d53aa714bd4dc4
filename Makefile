# Installs the four programs, their manual pages and their completions:
#
#     make && sudo make install
#     make install PREFIX=$HOME/.local
#     make install PREFIX=/usr DESTDIR=/tmp/package

PREFIX = /usr/local
DESTDIR =
CARGO = cargo
# Where cargo puts what it builds.
BUILT = target/release

to = $(DESTDIR)$(PREFIX)
share = $(to)/share

all:
	$(CARGO) build --release --locked --bins

install:
	install -d $(to)/bin $(to)/sbin
	install $(BUILT)/latch $(BUILT)/sema $(to)/bin
	install $(BUILT)/latchd $(BUILT)/lfpd $(to)/sbin
	for section in 1 5 7 8; do \
	    install -d $(share)/man/man$$section && \
	    install -m 644 man/*.$$section $(share)/man/man$$section || exit; \
	done
	install -d $(share)/bash-completion/completions
	for program in latchd latch sema lfpd; do \
	    install -m 644 completions/$$program.bash \
	        $(share)/bash-completion/completions/$$program || exit; \
	done
	install -d $(share)/zsh/site-functions $(share)/fish/vendor_completions.d
	install -m 644 completions/_* $(share)/zsh/site-functions
	install -m 644 completions/*.fish $(share)/fish/vendor_completions.d

.PHONY: all install
