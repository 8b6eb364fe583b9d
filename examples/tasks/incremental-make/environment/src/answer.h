#ifndef ANSWER
#define ANSWER 42
int answer(void);
#endif
