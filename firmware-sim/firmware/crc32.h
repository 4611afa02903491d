/* The check of frames and of the EEPROM's contents. */
#ifndef CRC32_H
#define CRC32_H

#include <stdint.h>

/* The CRC-32 of zlib and Ethernet (reflected 0x04C11DB7, start and final inversion 0xFFFFFFFF). */
uint32_t crc32(const uint8_t *bytes, uint8_t length);

/* One step of it, without the inversions, for bytes that do not stand in one place. */
uint32_t crc32_update(uint32_t crc, uint8_t byte);

#endif
