#!/bin/bash
set -e
cd /workspace
cat > Makefile <<'MAKE'
SOURCES := $(wildcard src/*.c)
OBJECTS := $(SOURCES:src/%.c=build/%.o)

build/app: $(OBJECTS)
	$(CC) $(CFLAGS) -o $@ $^

build/%.o: src/%.c | build
	$(CC) $(CFLAGS) -MMD -MP -c -o $@ $<

build:
	mkdir -p $@

clean:
	rm -rf build

.PHONY: clean
-include $(OBJECTS:.o=.d)
MAKE
make && ./build/app && make clean
